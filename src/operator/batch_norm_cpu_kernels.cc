// Compiled once per instruction set, with MXBN_INSTRUCTION_SET naming the namespace (see setup.py).
#include "batch_norm_cpu_kernels.h"

#include "vector.h"

namespace mxbn {
namespace MXBN_INSTRUCTION_SET {

// Independent sums that hide the latency of an addition.
constexpr int kUnroll = 4;

// Adds up kDoubles values in a fixed order.
inline double Sum(const Doubles& v) {
  double sum = 0;
  for (int i = 0; i < kDoubles; ++i) sum += v[i];
  return sum;
}

// The ReLU, and what it lets through of a gradient; of vectors or single values. Both keep a NaN.
template <typename V>
inline V Relu(V z) {
  const V zero = {};
  return z <= zero ? zero : z;
}
template <typename V>
inline V LetThrough(V dy, V y) {
  const V zero = {};
  return y > zero ? dy : y * zero;
}

// The two sums that Statistics and BackwardReduce are made of, for a vector or a single value.
template <typename T>
struct StatisticsTerm {
  using Stored = T;
  const T* x;

  void Prefetch(int64_t i) const { __builtin_prefetch(x + i); }

  template <typename V, typename LoadAs>
  void Add(int64_t i, V centre, LoadAs load, V* first, V* second) const {
    const V d = load(x + i) - centre;
    *first += d;
    *second += d * d;
  }
};

template <typename T, bool relu>
struct BackwardTermSum {
  using Stored = T;
  BackwardInputs<T> in;

  void Prefetch(int64_t i) const {
    __builtin_prefetch(in.x + i);
    __builtin_prefetch(in.dy + i);
    if (relu) __builtin_prefetch(in.y + i);
  }

  template <typename V, typename LoadAs>
  void Add(int64_t i, V centre, LoadAs load, V* first, V* second) const {
    const V dy = load(in.dy + i);
    const V g = relu ? LetThrough(dy, load(in.y + i)) : dy;
    *first += g;
    *second += g * (load(in.x + i) - centre);
  }
};

// Loads for the above: a vector of doubles, a single double.
struct AsVector {
  template <typename T>
  Doubles operator()(const T* p) const {
    return LoadDoubles(p);
  }
};
struct AsScalar {
  template <typename T>
  double operator()(const T* p) const {
    return static_cast<double>(ToCompute(*p));
  }
};

// Reduces a slab of one channel. Its rows lie far apart: what comes next, in this row or the next,
// is fetched early, since the processor's own prefetching stops at the end of a page.
template <typename Term>
void ReduceChannel(const Slab& slab, const Term term, double centre, double* sums,
                   int64_t sums_stride) {
  constexpr int64_t kLine = 64 / sizeof(typename Term::Stored);
  constexpr int64_t kAhead = 32 * kLine;
  const Doubles centres = Broadcast(centre);
  Doubles first[kUnroll] = {}, second[kUnroll] = {};
  double first_rest = 0, second_rest = 0;
  for (int64_t row = 0; row < slab.rows; ++row) {
    int64_t i = row * slab.stride;
    const int64_t end = i + slab.cols;
    for (int64_t j = 0; j < kAhead && j < slab.cols; j += kLine) term.Prefetch(i + slab.stride + j);
    for (; i + kUnroll * kDoubles <= end; i += kUnroll * kDoubles) {
      for (int64_t j = 0; j < kUnroll * kDoubles; j += kLine) term.Prefetch(i + kAhead + j);
      for (int u = 0; u < kUnroll; ++u) {
        term.Add(i + u * kDoubles, centres, AsVector(), &first[u], &second[u]);
      }
    }
    for (; i + kDoubles <= end; i += kDoubles) {
      term.Add(i, centres, AsVector(), &first[0], &second[0]);
    }
    for (; i < end; ++i) term.Add(i, centre, AsScalar(), &first_rest, &second_rest);
  }
  sums[0] += Sum((first[0] + first[1]) + (first[2] + first[3])) + first_rest;
  sums[sums_stride] += Sum((second[0] + second[1]) + (second[2] + second[3])) + second_rest;
}

// Reduces every column of a slab, a cache line's columns and kRows rows at a time, so that their
// sums stay in registers; the line that is needed some rows later is fetched early.
template <typename Term>
void ReduceColumns(const Slab& slab, const Term term, const double* centre, double* sums,
                   int64_t sums_stride) {
  constexpr int64_t kRows = 8;
  constexpr int kVectors = 64 / sizeof(typename Term::Stored) / kDoubles;
  constexpr int64_t kStep = kVectors * kDoubles;
  constexpr int64_t kAhead = 4096 / sizeof(typename Term::Stored);
  const int64_t ahead = (kAhead / slab.cols > kRows ? kAhead / slab.cols : kRows) * slab.stride;
  for (int64_t row = 0; row < slab.rows; row += kRows) {
    const int64_t end = row + kRows < slab.rows ? row + kRows : slab.rows;
    int64_t col = 0;
    for (; col + kStep <= slab.cols; col += kStep) {
      Doubles centres[kVectors], first[kVectors], second[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        centres[v] = Load(centre + col + v * kDoubles);
        first[v] = Load(sums + col + v * kDoubles);
        second[v] = Load(sums + sums_stride + col + v * kDoubles);
      }
      for (int64_t r = row; r < end; ++r) {
        const int64_t i = r * slab.stride + col;
        term.Prefetch(i + ahead);
        for (int v = 0; v < kVectors; ++v) {
          term.Add(i + v * kDoubles, centres[v], AsVector(), &first[v], &second[v]);
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        Store(sums + col + v * kDoubles, first[v]);
        Store(sums + sums_stride + col + v * kDoubles, second[v]);
      }
    }
    for (; col < slab.cols; ++col) {
      for (int64_t r = row; r < end; ++r) {
        term.Add(r * slab.stride + col, centre[col], AsScalar(), sums + col,
                 sums + sums_stride + col);
      }
    }
  }
}

template <Layout layout, typename Term>
void Reduce(const Slab& slab, const Term term, const double* centre, double* sums,
            int64_t sums_stride) {
  if (layout == kOneChannel) {
    ReduceChannel(slab, term, *centre, sums, sums_stride);
  } else {
    ReduceColumns(slab, term, centre, sums, sums_stride);
  }
}

template <typename T, Layout layout>
void Statistics(const Slab& slab, const T* x, const double* centre, double* sums,
                int64_t sums_stride) {
  Reduce<layout>(slab, StatisticsTerm<T>{x}, centre, sums, sums_stride);
}

template <typename T, Layout layout>
void BackwardReduce(const Slab& slab, const BackwardInputs<T>& in, const double* centre,
                    double* sums, int64_t sums_stride) {
  if (in.y != nullptr) {
    Reduce<layout>(slab, BackwardTermSum<T, true>{in}, centre, sums, sums_stride);
  } else {
    Reduce<layout>(slab, BackwardTermSum<T, false>{in}, centre, sums, sums_stride);
  }
}

// Load or ToCompute, by the type that is asked for.
template <typename V, typename T>
inline V As(const T* p);
template <>
inline Vector<float> As(const Half* p) {
  return Load(p);
}
template <>
inline Vector<float> As(const float* p) {
  return Load(p);
}
template <>
inline Vector<double> As(const double* p) {
  return Load(p);
}
template <>
inline float As(const Half* p) {
  return ToCompute(*p);
}
template <>
inline float As(const float* p) {
  return *p;
}
template <>
inline double As(const double* p) {
  return *p;
}

// The parameters of a slab: single values that hold for all columns, or each column's own.
template <typename C, Layout layout>
struct Terms {
  const C* table;
  int64_t stride;

  C Get(int term, int64_t col, C*) const {
    return table[term * stride + (layout == kOneChannel ? 0 : col)];
  }
  Vector<C> Get(int term, int64_t col, Vector<C>*) const {
    const C* p = table + term * stride;
    return layout == kOneChannel ? Broadcast(*p) : Load(p + col);
  }
};

// What Elementwise computes, for a vector of values or a single one, with the terms of a column.
template <typename V, bool add, bool relu>
struct ForwardFormula {
  V mean_high, mean_low, scale, offset;

  template <typename Terms>
  ForwardFormula(const Terms& terms, int64_t col, V* as = nullptr)
      : mean_high(terms.Get(kMeanHigh, col, as)),
        mean_low(terms.Get(kMeanLow, col, as)),
        scale(terms.Get(kScale, col, as)),
        offset(terms.Get(kOffset, col, as)) {}

  template <typename T>
  V operator()(const ForwardInputs<T>& in, int64_t i) const {
    V z = ((As<V>(in.x + i) - mean_high) - mean_low) * scale + offset;
    if (add) z += As<V>(in.addend + i);
    return relu ? Relu(z) : z;
  }
};
template <typename V>
using Normalize = ForwardFormula<V, false, false>;
template <typename V>
using NormalizeAdd = ForwardFormula<V, true, false>;
template <typename V>
using NormalizeRelu = ForwardFormula<V, false, true>;
template <typename V>
using NormalizeAddRelu = ForwardFormula<V, true, true>;

// What comes back to the normalization.
template <typename V, bool relu, typename T>
inline V HeadGradient(const BackwardInputs<T>& in, int64_t i) {
  const V dy = As<V>(in.dy + i);
  return relu ? LetThrough(dy, As<V>(in.y + i)) : dy;
}

template <typename V, bool relu>
struct BatchBackwardFormula {
  V mean_high, mean_low, scale, slope, shift_high, shift_low;

  template <typename Terms>
  BatchBackwardFormula(const Terms& terms, int64_t col, V* as = nullptr)
      : mean_high(terms.Get(kMeanHigh, col, as)),
        mean_low(terms.Get(kMeanLow, col, as)),
        scale(terms.Get(kScale, col, as)),
        slope(terms.Get(kSlope, col, as)),
        shift_high(terms.Get(kShiftHigh, col, as)),
        shift_low(terms.Get(kShiftLow, col, as)) {}

  template <typename T>
  V operator()(const BackwardInputs<T>& in, int64_t i) const {
    const V centred = (As<V>(in.x + i) - mean_high) - mean_low;
    const V g = HeadGradient<V, relu>(in, i);
    return scale * ((g - shift_high) - (centred * slope + shift_low));
  }
};
template <typename V>
using BatchBackward = BatchBackwardFormula<V, false>;
template <typename V>
using BatchBackwardRelu = BatchBackwardFormula<V, true>;

template <typename V, bool relu>
struct MovingBackwardFormula {
  V scale;

  template <typename Terms>
  MovingBackwardFormula(const Terms& terms, int64_t col, V* as = nullptr)
      : scale(terms.Get(kScale, col, as)) {}

  template <typename T>
  V operator()(const BackwardInputs<T>& in, int64_t i) const {
    return scale * HeadGradient<V, relu>(in, i);
  }
};
template <typename V>
using MovingBackward = MovingBackwardFormula<V, false>;
template <typename V>
using MovingBackwardRelu = MovingBackwardFormula<V, true>;

template <typename V>
struct MaskFormula {
  template <typename Terms>
  MaskFormula(const Terms&, int64_t) {}

  template <typename T>
  V operator()(const BackwardInputs<T>& in, int64_t i) const {
    return HeadGradient<V, true>(in, i);
  }
};

// One result, written as `write` says.
template <Write write, typename T>
inline void Put(T* out, ParamType<T> value) {
  *out = FromCompute<T>(write == Write::kAdd ? ToCompute(*out) + value : value);
}
template <Write write, typename T>
inline void Put(T* out, Vector<ParamType<T>> v) {
  if (write == Write::kStream) {
    Stream(out, v);
  } else {
    Store(out, write == Write::kAdd ? Load(out) + v : v);
  }
}

// Computes out = formula(in) for every value of the slab, vectors first.
template <template <typename> class Formula, Layout layout, Write write, typename Inputs,
          typename T>
inline void Elementwise(const Slab& slab, const Inputs in, const Terms<ParamType<T>, layout> terms,
                        T* out) {
  using C = ParamType<T>;
  constexpr int kLanes = Lanes<C>();
  constexpr uintptr_t kAlignment = kLanes * sizeof(T);
  constexpr int64_t kFetched = 512 / sizeof(T);
  // Rows at a time: the terms of a column serve all of them. Streams fill line after line.
  constexpr int64_t kRows = layout == kColumns && write != Write::kStream ? 4 : 1;
  const Formula<Vector<C>> all(terms, 0);
  for (int64_t row = 0; row < slab.rows; row += kRows) {
    const int64_t start = row * slab.stride;
    const int64_t rows = row + kRows <= slab.rows ? kRows : slab.rows - row;
    int64_t col = 0;
    if (layout == kOneChannel && write != Write::kStream) {  // the next row lies far away
      for (int64_t j = 0; j < kFetched && j < slab.cols; j += 64 / sizeof(T)) {
        __builtin_prefetch(out + start + slab.stride + j, 1);
      }
    }
    const auto rest = [&](int64_t to) {
      for (; col < to; ++col) {
        const Formula<C> formula(terms, col);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t i = start + r * slab.stride + col;
          Put<write>(out + i, formula(in, i));
        }
      }
    };
    if (write == Write::kStream) {
      const uintptr_t over = reinterpret_cast<uintptr_t>(out + start) % kAlignment;
      rest(over == 0 ? 0 : static_cast<int64_t>((kAlignment - over) / sizeof(T)));
    }
    for (; col + kLanes <= slab.cols; col += kLanes) {
      const Formula<Vector<C>> formula =
          layout == kOneChannel ? all : Formula<Vector<C>>(terms, col);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t i = start + r * slab.stride + col;
        Put<write>(out + i, formula(in, i));
      }
    }
    rest(slab.cols);
  }
  if (write == Write::kStream) _mm_sfence();  // before other threads are told
}

template <template <typename> class Formula, Layout layout, typename Inputs, typename T>
void Elementwise(const Slab& slab, const Inputs& in, const ParamType<T>* table, int64_t stride,
                 T* out, Write write) {
  // Rows shorter than a few cache lines would leave too many lines half written.
  constexpr int64_t kLeastStreamed = 256 / sizeof(T);
  const Terms<ParamType<T>, layout> terms{table, stride};
  if (write == Write::kAdd) {
    Elementwise<Formula, layout, Write::kAdd>(slab, in, terms, out);
  } else if (write == Write::kStream && slab.cols >= kLeastStreamed) {
    Elementwise<Formula, layout, Write::kStream>(slab, in, terms, out);
  } else {
    Elementwise<Formula, layout, Write::kStore>(slab, in, terms, out);
  }
}

template <typename T, Layout layout>
void Forward(const Slab& slab, const ForwardInputs<T>& in, const ParamType<T>* terms,
             int64_t terms_stride, T* y, Write write) {
  if (in.addend == nullptr) {
    if (in.relu) {
      Elementwise<NormalizeRelu, layout>(slab, in, terms, terms_stride, y, write);
    } else {
      Elementwise<Normalize, layout>(slab, in, terms, terms_stride, y, write);
    }
  } else if (in.relu) {
    Elementwise<NormalizeAddRelu, layout>(slab, in, terms, terms_stride, y, write);
  } else {
    Elementwise<NormalizeAdd, layout>(slab, in, terms, terms_stride, y, write);
  }
}

template <typename T, Layout layout>
void Backward(const Slab& slab, const BackwardInputs<T>& in, const ParamType<T>* terms,
              int64_t terms_stride, T* dx, Write write) {
  if (in.x != nullptr) {
    if (in.y != nullptr) {
      Elementwise<BatchBackwardRelu, layout>(slab, in, terms, terms_stride, dx, write);
    } else {
      Elementwise<BatchBackward, layout>(slab, in, terms, terms_stride, dx, write);
    }
  } else if (in.y != nullptr) {
    Elementwise<MovingBackwardRelu, layout>(slab, in, terms, terms_stride, dx, write);
  } else {
    Elementwise<MovingBackward, layout>(slab, in, terms, terms_stride, dx, write);
  }
}

template <typename T, Layout layout>
void Mask(const Slab& slab, const BackwardInputs<T>& in, T* daddend, Write write) {
  const ParamType<T>* no_terms = nullptr;
  Elementwise<MaskFormula, layout>(slab, in, no_terms, 0, daddend, write);
}

template <typename T>
const Kernels<T>& Table() {
  static const Kernels<T> table = {[](T value) { return ToCompute(value); },
                                   {Statistics<T, kOneChannel>, Statistics<T, kColumns>},
                                   {Forward<T, kOneChannel>, Forward<T, kColumns>},
                                   {BackwardReduce<T, kOneChannel>, BackwardReduce<T, kColumns>},
                                   {Backward<T, kOneChannel>, Backward<T, kColumns>},
                                   {Mask<T, kOneChannel>, Mask<T, kColumns>}};
  return table;
}

template const Kernels<Half>& Table<Half>();
template const Kernels<float>& Table<float>();
template const Kernels<double>& Table<double>();

}  // namespace MXBN_INSTRUCTION_SET
}  // namespace mxbn
