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

template <typename T>
struct BackwardTermSum {
  using Stored = T;
  const T* x;
  const T* dy;

  void Prefetch(int64_t i) const {
    __builtin_prefetch(x + i);
    __builtin_prefetch(dy + i);
  }

  template <typename V, typename LoadAs>
  void Add(int64_t i, V centre, LoadAs load, V* first, V* second) const {
    const V g = load(dy + i);
    *first += g;
    *second += g * (load(x + i) - centre);
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

// Reduces every column of a slab. kUnroll rows at a time, so that a sum is loaded and stored less.
template <typename Term>
void ReduceColumns(const Slab& slab, const Term term, const double* centre, double* sums,
                   int64_t sums_stride) {
  for (int64_t row = 0; row < slab.rows; row += kUnroll) {
    const int64_t end = row + kUnroll < slab.rows ? row + kUnroll : slab.rows;
    int64_t col = 0;
    for (; col + kDoubles <= slab.cols; col += kDoubles) {
      const Doubles centres = Load(centre + col);
      Doubles first = Load(sums + col), second = Load(sums + sums_stride + col);
      for (int64_t r = row; r < end; ++r) {
        term.Add(r * slab.stride + col, centres, AsVector(), &first, &second);
      }
      Store(sums + col, first);
      Store(sums + sums_stride + col, second);
    }
    for (; col < slab.cols; ++col) {
      for (int64_t r = row; r < end; ++r) {
        term.Add(r * slab.stride + col, centre[col], AsScalar(), sums + col,
                 sums + sums_stride + col);
      }
    }
  }
}

template <typename T, Layout layout>
void Statistics(const Slab& slab, const T* x, const double* centre, double* sums,
                int64_t sums_stride) {
  const StatisticsTerm<T> term{x};
  if (layout == kOneChannel) {
    ReduceChannel(slab, term, *centre, sums, sums_stride);
  } else {
    ReduceColumns(slab, term, centre, sums, sums_stride);
  }
}

template <typename T, Layout layout>
void BackwardReduce(const Slab& slab, const T* x, const T* dy, const double* centre, double* sums,
                    int64_t sums_stride) {
  const BackwardTermSum<T> term{x, dy};
  if (layout == kOneChannel) {
    ReduceChannel(slab, term, *centre, sums, sums_stride);
  } else {
    ReduceColumns(slab, term, centre, sums, sums_stride);
  }
}

// One term of a table: the same for all columns of the slab, or each column's own.
template <typename C, Layout layout>
class Term {
 public:
  Term(const C* terms, int64_t terms_stride, int term)
      : column_(terms + term * terms_stride), value_(*column_), vector_(Broadcast(value_)) {}
  Vector<C> At(int64_t col, Vector<C>*) const {
    return layout == kOneChannel ? vector_ : Load(column_ + col);
  }
  C At(int64_t col, C*) const { return layout == kOneChannel ? value_ : column_[col]; }

 private:
  const C* column_;
  C value_;
  Vector<C> vector_;
};

// One result, written as `write` says.
template <typename T, typename C>
inline void Put(T* out, C value, Write write) {
  *out = FromCompute<T>(write == Write::kAdd ? ToCompute(*out) + value : value);
}

// Computes map.At(index, column) for every value of the slab, vectors first, and writes it. Inlined
// and with the map by value, so that its terms stay in registers.
template <Write write, typename T, typename Map>
inline __attribute__((always_inline)) void Elementwise(const Slab& slab, const Map map, T* out) {
  using C = ParamType<T>;
  constexpr int kLanes = Lanes<C>();
  constexpr uintptr_t kAlignment = kLanes * sizeof(T);
  constexpr int64_t kFetched = 512 / sizeof(T);
  for (int64_t row = 0; row < slab.rows; ++row) {
    const int64_t start = row * slab.stride;
    int64_t col = 0;
    if (write != Write::kStream && slab.stride > slab.cols) {  // the next row lies far away
      for (int64_t j = 0; j < kFetched && j < slab.cols; j += 64 / sizeof(T)) {
        __builtin_prefetch(out + start + slab.stride + j, 1);
      }
    }
    if (write == Write::kStream) {
      for (; col < slab.cols && reinterpret_cast<uintptr_t>(out + start + col) % kAlignment;
           ++col) {
        Put(out + start + col, map.template At<C>(start + col, col), write);
      }
    }
    for (; col + kLanes <= slab.cols; col += kLanes) {
      Vector<C> v = map.template At<Vector<C>>(start + col, col);
      if (write == Write::kAdd) v += Load(out + start + col);
      if (write == Write::kStream) {
        Stream(out + start + col, v);
      } else {
        Store(out + start + col, v);
      }
    }
    for (; col < slab.cols; ++col) {
      Put(out + start + col, map.template At<C>(start + col, col), write);
    }
  }
  if (write == Write::kStream) _mm_sfence();  // before other threads are told
}

// Load or ToCompute, by the type that is asked for.
template <typename T>
inline Vector<ParamType<T>> LoadAs(const T* p, Vector<ParamType<T>>*) {
  return Load(p);
}
template <typename T>
inline ParamType<T> LoadAs(const T* p, ParamType<T>*) {
  return ToCompute(*p);
}

template <typename T, Layout layout>
struct ForwardMap {
  using C = ParamType<T>;
  const T* x;
  Term<C, layout> mean_high, mean_low, scale, offset;

  ForwardMap(const T* x, const C* terms, int64_t stride)
      : x(x),
        mean_high(terms, stride, kMeanHigh),
        mean_low(terms, stride, kMeanLow),
        scale(terms, stride, kScale),
        offset(terms, stride, kOffset) {}

  template <typename V>
  V At(int64_t i, int64_t col) const {
    V* as = nullptr;
    const V centred = (LoadAs(x + i, as) - mean_high.At(col, as)) - mean_low.At(col, as);
    return centred * scale.At(col, as) + offset.At(col, as);
  }
};

template <typename T, Layout layout>
struct BatchBackwardMap {
  using C = ParamType<T>;
  const T* x;
  const T* dy;
  Term<C, layout> mean_high, mean_low, scale, slope, shift_high, shift_low;

  BatchBackwardMap(const T* x, const T* dy, const C* terms, int64_t stride)
      : x(x),
        dy(dy),
        mean_high(terms, stride, kMeanHigh),
        mean_low(terms, stride, kMeanLow),
        scale(terms, stride, kScale),
        slope(terms, stride, kSlope),
        shift_high(terms, stride, kShiftHigh),
        shift_low(terms, stride, kShiftLow) {}

  template <typename V>
  V At(int64_t i, int64_t col) const {
    V* as = nullptr;
    const V centred = (LoadAs(x + i, as) - mean_high.At(col, as)) - mean_low.At(col, as);
    const V shifted = LoadAs(dy + i, as) - shift_high.At(col, as);
    return scale.At(col, as) * (shifted - (centred * slope.At(col, as) + shift_low.At(col, as)));
  }
};

template <typename T, Layout layout>
struct MovingBackwardMap {
  using C = ParamType<T>;
  const T* dy;
  Term<C, layout> scale;

  template <typename V>
  V At(int64_t i, int64_t col) const {
    V* as = nullptr;
    return scale.At(col, as) * LoadAs(dy + i, as);
  }
};

template <typename T, typename Map>
inline __attribute__((always_inline)) void Elementwise(const Slab& slab, const Map map, T* out,
                                                       Write write) {
  // Rows shorter than a few cache lines would leave too many lines half written.
  constexpr int64_t kLeastStreamed = 256 / sizeof(T);
  if (write == Write::kAdd) {
    Elementwise<Write::kAdd>(slab, map, out);
  } else if (write == Write::kStream && slab.cols >= kLeastStreamed) {
    Elementwise<Write::kStream>(slab, map, out);
  } else {
    Elementwise<Write::kStore>(slab, map, out);
  }
}

template <typename T, Layout layout>
void Forward(const Slab& slab, const T* x, const ParamType<T>* terms, int64_t terms_stride, T* y,
             Write write) {
  Elementwise(slab, ForwardMap<T, layout>(x, terms, terms_stride), y, write);
}

template <typename T, Layout layout>
void Backward(const Slab& slab, const T* x, const T* dy, const ParamType<T>* terms,
              int64_t terms_stride, T* dx, Write write) {
  if (x != nullptr) {
    Elementwise(slab, BatchBackwardMap<T, layout>(x, dy, terms, terms_stride), dx, write);
  } else {
    Elementwise(slab, MovingBackwardMap<T, layout>{dy, {terms, terms_stride, kScale}}, dx, write);
  }
}

template <typename T>
const Kernels<T>& Table() {
  static const Kernels<T> table = {[](T value) { return ToCompute(value); },
                                   {Statistics<T, kOneChannel>, Statistics<T, kColumns>},
                                   {Forward<T, kOneChannel>, Forward<T, kColumns>},
                                   {BackwardReduce<T, kOneChannel>, BackwardReduce<T, kColumns>},
                                   {Backward<T, kOneChannel>, Backward<T, kColumns>}};
  return table;
}

template const Kernels<Half>& Table<Half>();
template const Kernels<float>& Table<float>();
template const Kernels<double>& Table<double>();

}  // namespace MXBN_INSTRUCTION_SET
}  // namespace mxbn
