// BatchNorm on a GPU: one text for NVRTC (which embeds it in the library), nvcc and, over an
// emulation of CUDA, g++ (tests/cuda).
//
// A pass reduces to two sums per channel (statistics, backward_reduce), decides per channel what
// they mean (forward_finish, backward_finish) and computes one value per value (forward, backward).
// The passes with an addend or a ReLU have kernels of their own (..._fused), which read one more
// tensor.
// The tensor is taken in one of two ways:
//   rows     inner is at least a warp wide: a block has a piece of one channel;
//   columns  else, channels-last above all: a block has some rows of a matrix of channels x inner
//            columns, a thread the same few columns of each.
// Sums are kept, compensated, in float about a pivot (double for float64), and added up in a fixed
// order: every run gives the same bits.
#include "batch_norm_gpu_arguments.h"
#include "counter.h"

#ifdef MXBN_CUDA_EMULATION
#include "float16.h"
#endif

namespace mxbn {
namespace gpu {

#ifdef MXBN_CUDA_EMULATION
using ::mxbn::Half;
__device__ inline float ToFloat(Half value) { return HalfToFloat(value); }
__device__ inline Half ToHalf(float value) { return FloatToHalf(value); }
#else
// Conversions of our own, since NVRTC would need a path to find cuda_fp16.h.
struct Half {
  unsigned short bits;
};
__device__ inline float ToFloat(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
__device__ inline Half ToHalf(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
#endif

// The type of single values in arithmetic, and of gamma, beta and the moving statistics.
template <typename T>
struct ComputeTypeOf {
  using type = float;
};
template <>
struct ComputeTypeOf<double> {
  using type = double;
};
template <typename T>
using Compute = typename ComputeTypeOf<T>::type;

__device__ inline float ToCompute(Half value) { return ToFloat(value); }
__device__ inline float ToCompute(float value) { return value; }
__device__ inline double ToCompute(double value) { return value; }
__device__ inline void Assign(Half* to, float value) { *to = ToHalf(value); }
__device__ inline void Assign(float* to, float value) { *to = value; }
__device__ inline void Assign(double* to, double value) { *to = value; }

// N values that one access reads or writes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
  __device__ Compute<T> operator[](int i) const { return ToCompute(values[i]); }
};
template <typename T, int N>
__device__ inline Pack<T, N> Load(const void* tensor, long long i) {
  return *reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(tensor) + i);
}
template <typename T, int N>
__device__ inline void Store(void* tensor, long long i, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(tensor) + i) = pack;
}

// A sum of many values, which carries what additions lose (Knuth's TwoSum).
template <typename C>
struct Sum {
  C value, lost;
  __device__ explicit Sum(C first = 0, C rest = 0) : value(first), lost(rest) {}
  __device__ void Add(C term) {
    const C sum = value + term;
    const C part = sum - value;
    lost += (value - (sum - part)) + (term - part);
    value = sum;
  }
  __device__ void Join(const Sum& other) {
    Add(other.value);
    lost += other.lost;
  }
  __device__ bool IsFinite() const { return value - value == 0; }
  __device__ C Value() const { return IsFinite() ? value + lost : value; }
};

__device__ inline Sum<double> Widen(const Sum<double>& sum) { return sum; }
__device__ inline Sum<double> Widen(const Sum<float>& sum) {
  return Sum<double>(sum.value, sum.lost);
}

template <typename C>
__device__ inline C Middle(C a, C b, C c) {
  const C low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// The middle one of the middle ones of three times three values of a channel, from all over it. Not
// inlined: it is small work, and much code.
template <typename T>
__device__ __noinline__ Compute<T> MiddleOfNine(const T* x, long long outer, long long inner,
                                                long long stride) {
  const auto at = [&](int i) {
    return ToCompute(x[i * (outer - 1) / 8 * stride + 5 * i % 9 * (inner - 1) / 8]);
  };
  return Middle(Middle(at(0), at(1), at(2)), Middle(at(3), at(4), at(5)),
                Middle(at(6), at(7), at(8)));
}

// A value about which a channel is summed. It lies within some standard deviations of the mean,
// whatever outliers there are: squares of float about a value far away would lose too much. If all
// values are equal, it is that value.
template <typename T>
__device__ Compute<T> Pivot(const Arguments& a, long long channel) {
  const T* x = static_cast<const T*>(a.x) + channel * a.inner;
  return MiddleOfNine(x, a.outer, a.inner, a.channels * a.inner);
}

// A value in two parts: what the type cannot hold of it goes to the second.
template <typename C>
struct Split {
  C high, low;
  __device__ explicit Split(double value) : high(static_cast<C>(value)) {
    const double rest = value - static_cast<double>(high);
    low = rest - rest == 0 ? static_cast<C>(rest) : C(0);  // 0 if not finite
  }
};

__device__ inline bool UsesBatch(const Arguments& a) { return a.saved[2 * a.channels] != 0; }
// Whether a backward needs its two sums: in moving mode, dx does not. Only `saved`, on the device,
// knows the mode.
__device__ inline bool NeedsSums(const Arguments& a) {
  return UsesBatch(a) || a.second != nullptr || (a.first != nullptr && a.gamma != nullptr);
}
// How many values of a channel the batch has.
__device__ inline double BatchCount(const Arguments& a) {
  return a.batch != nullptr ? a.batch[2 * a.channels] : static_cast<double>(a.outer * a.inner);
}
template <typename C>
__device__ double Gamma(const Arguments& a, long long channel) {
  return a.gamma == nullptr ? 1.0 : static_cast<double>(static_cast<const C*>(a.gamma)[channel]);
}

// The ReLU, and what it lets through of a gradient. Both keep a NaN, as MXNet's do.
template <typename C>
__device__ inline C Relu(C z) {
  return z <= 0 ? C(0) : z;
}
template <typename C>
__device__ inline C LetThrough(C dy, C y) {
  return y > 0 ? dy : y * 0;
}

// The two sums that the statistics and the gradients are made of, for a channel.
template <typename T>
struct StatisticsTerm {
  static constexpr bool kReadsGradient = false, kFused = false;
  Compute<T> centre;
  __device__ StatisticsTerm() {}
  __device__ StatisticsTerm(const Arguments& a, long long channel) : centre(Pivot<T>(a, channel)) {}
  __device__ void operator()(Compute<T> x, Compute<T>, Compute<T>, Compute<T>* first,
                             Compute<T>* second) const {
    const Compute<T> d = x - centre;
    *first = d;
    *second = d * d;
  }
};
template <typename T>
struct BackwardReduceTerm {
  static constexpr bool kReadsGradient = true, kFused = false;
  Compute<T> mean_high, mean_low;
  __device__ BackwardReduceTerm() {}
  __device__ BackwardReduceTerm(const Arguments& a, long long channel) {
    const Split<Compute<T>> mean(a.saved[channel]);
    mean_high = mean.high;
    mean_low = mean.low;
  }
  __device__ void operator()(Compute<T> x, Compute<T> dy, Compute<T>, Compute<T>* first,
                             Compute<T>* second) const {
    *first = dy;
    *second = dy * ((x - mean_high) - mean_low);
  }
};

// What becomes of a value, for a channel.
template <typename T>
struct ForwardFormula {
  static constexpr bool kReadsData = true, kReadsGradient = false, kFused = false;
  Compute<T> mean_high, mean_low, scale, offset;
  __device__ ForwardFormula() {}
  __device__ ForwardFormula(const Arguments& a, long long channel) {
    using C = Compute<T>;
    const Split<C> mean(a.saved[channel]);
    mean_high = mean.high;
    mean_low = mean.low;
    scale = static_cast<C>(a.terms[channel]);
    offset = static_cast<C>(a.terms[a.channels + channel]);
  }
  __device__ Compute<T> operator()(Compute<T> x, Compute<T>, Compute<T>) const {
    return ((x - mean_high) - mean_low) * scale + offset;
  }
};
template <typename T>
struct FusedForwardFormula : ForwardFormula<T> {
  static constexpr bool kFused = true;
  bool add, relu;
  __device__ FusedForwardFormula() {}
  __device__ FusedForwardFormula(const Arguments& a, long long channel)
      : ForwardFormula<T>(a, channel), add(a.fused != nullptr), relu(a.relu) {}
  __device__ Compute<T> operator()(Compute<T> x, Compute<T> dy, Compute<T> addend) const {
    Compute<T> z = ForwardFormula<T>::operator()(x, dy, addend);
    if (add) z += addend;
    return relu ? Relu(z) : z;
  }
};
template <typename T>
struct BatchBackwardFormula {
  static constexpr bool kReadsData = true, kReadsGradient = true, kFused = false;
  Compute<T> mean_high, mean_low, scale, slope, shift_high, shift_low;
  __device__ BatchBackwardFormula() {}
  __device__ BatchBackwardFormula(const Arguments& a, long long channel) {
    using C = Compute<T>;
    const double inv_std = a.saved[a.channels + channel];
    const double n = BatchCount(a);
    const Split<C> mean(a.saved[channel]);
    const Split<C> shift(a.terms[channel] / n);
    mean_high = mean.high;
    mean_low = mean.low;
    scale = static_cast<C>(Gamma<C>(a, channel) * inv_std);
    slope = static_cast<C>(inv_std * a.terms[a.channels + channel] / n);
    shift_high = shift.high;
    shift_low = shift.low;
  }
  __device__ Compute<T> operator()(Compute<T> x, Compute<T> dy, Compute<T>) const {
    const Compute<T> centred = (x - mean_high) - mean_low;
    return scale * ((dy - shift_high) - (centred * slope + shift_low));
  }
};
template <typename T>
struct MovingBackwardFormula {
  static constexpr bool kReadsData = false, kReadsGradient = true, kFused = false;
  Compute<T> scale;
  __device__ MovingBackwardFormula() {}
  __device__ MovingBackwardFormula(const Arguments& a, long long channel)
      : scale(static_cast<Compute<T>>(Gamma<Compute<T>>(a, channel) *
                                      a.saved[a.channels + channel])) {}
  __device__ Compute<T> operator()(Compute<T>, Compute<T> dy, Compute<T>) const {
    return scale * dy;
  }
};

// A term or formula of a backward, of what the ReLU lets through of dy.
template <typename Of>
struct BehindRelu : Of {
  static constexpr bool kFused = true;
  __device__ BehindRelu() {}
  __device__ BehindRelu(const Arguments& a, long long channel) : Of(a, channel) {}
  template <typename C, typename... Sums>
  __device__ auto operator()(C x, C dy, C y, Sums*... sums) const {
    return Of::operator()(x, LetThrough(dy, y), y, sums...);
  }
};

// The accesses of one channel that a thread makes, kThreads apart. Block (channel, split).
template <int N>
class RowWalk {
 public:
  __device__ explicit RowWalk(const Arguments& a)
      : cols_(a.inner / N), stride_(a.channels * a.inner), first_(blockIdx.x * a.inner) {
    const long long all = a.outer * cols_, start = blockIdx.y * a.piece + threadIdx.x;
    const long long end = (blockIdx.y + 1) * a.piece < all ? (blockIdx.y + 1) * a.piece : all;
    left_ = start < end ? (end - start + kThreads - 1) / kThreads : 0;
    row_ = start / cols_;
    col_ = start - row_ * cols_;
    step_rows_ = cols_ > kThreads ? 0 : kThreads / static_cast<int>(cols_);
    step_cols_ = kThreads - step_rows_ * cols_;
  }
  __device__ long long left() const { return left_; }
  // The index of the access that comes next; then the one after it comes next.
  __device__ long long Next() {
    const long long index = row_ * stride_ + first_ + col_ * N;
    row_ += step_rows_;
    col_ += step_cols_;
    if (col_ >= cols_) ++row_, col_ -= cols_;
    --left_;
    return index;
  }

 private:
  long long cols_, stride_, first_, row_, col_, left_, step_cols_;
  int step_rows_;
};

// The same for columns: one access in each of a thread's rows; threads beyond the last column make
// none. Block (tile of columns, split).
template <int N>
class ColumnWalk {
 public:
  __device__ explicit ColumnWalk(const Arguments& a)
      : width_(a.channels * a.inner), rows_at_once_(kThreads / a.lanes) {
    const int lane = threadIdx.x % a.lanes;
    column_ = (static_cast<long long>(blockIdx.x) * a.lanes + lane) * N;
    const long long start = blockIdx.y * a.piece + threadIdx.x / a.lanes;
    const long long next = (blockIdx.y + 1) * a.piece, end = next < a.outer ? next : a.outer;
    left_ = start < end && !outside() ? (end - start + rows_at_once_ - 1) / rows_at_once_ : 0;
    index_ = start * width_ + column_;
  }
  __device__ bool outside() const { return column_ >= width_; }
  __device__ long long column() const { return column_; }
  __device__ long long width() const { return width_; }
  __device__ long long left() const { return left_; }
  __device__ long long Next() {
    const long long index = index_;
    index_ += rows_at_once_ * width_;
    --left_;
    return index;
  }

 private:
  long long width_, column_, left_, index_;
  int rows_at_once_;
};

// Makes what belongs to the channel of each of N columns.
template <int N, typename Of>
__device__ inline void ForColumns(const Arguments& a, long long column, Of* of) {
  long long channel = column / a.inner, rest = column - channel * a.inner;
  for (int n = 0; n < N; ++n) {
    of[n] = Of(a, channel);
    if (++rest == a.inner) ++channel, rest = 0;
  }
}

// Accesses that are under way at once, and whose values are added up before they join the sum.
constexpr int kUnroll = 4;

// Calls f(index, x, dy, fused) with the packs of `count` accesses, all of which are requested
// before the first. What is not read is given as another one.
template <typename T, int N, bool x_too, bool dy_too, bool fused_too, int count, typename Walk,
          typename F>
__device__ inline void Read(const Arguments& a, Walk* walk, const F& f) {
  Pack<T, N> x[count], dy[count], fused[count];
  long long at[count];
  for (int u = 0; u < count; ++u) {
    at[u] = walk->Next();
    if (x_too) x[u] = Load<T, N>(a.x, at[u]);
    if (dy_too) dy[u] = Load<T, N>(a.dy, at[u]);
    if (fused_too && a.fused != nullptr) fused[u] = Load<T, N>(a.fused, at[u]);
  }
  for (int u = 0; u < count; ++u) {
    const Pack<T, N>& one = x_too ? x[u] : dy[u];
    f(at[u], one, dy_too ? dy[u] : one, fused_too && a.fused != nullptr ? fused[u] : one);
  }
}

// Adds up values, their number a power of two, in pairs: of values that are nearly equal, as
// squares about a pivot may be, one after the other would lose the same at every addition.
template <int count, typename C>
__device__ inline C SumPairs(C (&values)[count]) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

// Adds up what the lanes of a warp have, in a fixed order. All get the same value.
__device__ inline Sum<double> WarpSum(Sum<double> sum) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum.Join(Sum<double>(__shfl_xor_sync(0xffffffffu, sum.value, offset),
                         __shfl_xor_sync(0xffffffffu, sum.lost, offset)));
  }
  return sum;
}

// Where the parts of a reduction keep a sum.
__device__ inline void StorePart(const Arguments& a, long long at, const Sum<double>& sum) {
  a.parts[2 * at] = sum.value;
  a.parts[2 * at + 1] = sum.lost;
}
__device__ inline Sum<double> LoadPart(const Arguments& a, long long at) {
  return Sum<double>(a.parts[2 * at], a.parts[2 * at + 1]);
}

template <typename T, int N, typename Term, int count>
__device__ inline void AddRow(const Arguments& a, const Term& term, RowWalk<N>* walk,
                              Sum<Compute<T>>* sums) {
  Compute<T> first[count * N], second[count * N];
  int i = 0;
  Read<T, N, true, Term::kReadsGradient, Term::kFused, count>(
      a, walk, [&](long long, const Pack<T, N>& x, const Pack<T, N>& dy, const Pack<T, N>& y) {
        for (int n = 0; n < N; ++n, ++i) term(x[n], dy[n], y[n], &first[i], &second[i]);
      });
  sums[0].Add(SumPairs(first));
  sums[1].Add(SumPairs(second));
}

template <typename T, int N, typename Term>
__device__ void ReduceRows(const Arguments& a) {
  __shared__ double warps[2][2][kThreads / kWarp];  // of each sum, its value and what it lost
  RowWalk<N> walk(a);
  const Term term(a, blockIdx.x);
  Sum<Compute<T>> sums[2];
  while (walk.left() >= kUnroll) AddRow<T, N, Term, kUnroll>(a, term, &walk, sums);
#pragma unroll 1
  while (walk.left() > 0) AddRow<T, N, Term, 1>(a, term, &walk, sums);
  for (int k = 0; k < 2; ++k) {
    const Sum<double> sum = WarpSum(Widen(sums[k]));
    if (threadIdx.x % kWarp == 0) {
      warps[k][0][threadIdx.x / kWarp] = sum.value;
      warps[k][1][threadIdx.x / kWarp] = sum.lost;
    }
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    const auto& of = warps[threadIdx.x];
    Sum<double> sum;
    for (int i = 0; i < kThreads / kWarp; ++i) sum.Join(Sum<double>(of[0][i], of[1][i]));
    StorePart(a, (2 * blockIdx.y + threadIdx.x) * a.channels + blockIdx.x, sum);
  }
}

template <typename T, int N, typename Term, int count>
__device__ inline void AddColumns(const Arguments& a, const Term* terms, ColumnWalk<N>* walk,
                                  Sum<Compute<T>> (*sums)[2]) {
  Compute<T> first[N][count], second[N][count];
  int i = 0;
  Read<T, N, true, Term::kReadsGradient, Term::kFused, count>(
      a, walk, [&](long long, const Pack<T, N>& x, const Pack<T, N>& dy, const Pack<T, N>& y) {
        for (int n = 0; n < N; ++n) terms[n](x[n], dy[n], y[n], &first[n][i], &second[n][i]);
        ++i;
      });
  for (int n = 0; n < N; ++n) {
    sums[n][0].Add(SumPairs(first[n]));
    sums[n][1].Add(SumPairs(second[n]));
  }
}

template <typename T, int N, typename Term>
__device__ void ReduceColumns(const Arguments& a) {
  __shared__ double block[2][2][kThreads];  // of each sum, its value and what it lost
  ColumnWalk<N> walk(a);
  Term terms[N];
  Sum<Compute<T>> sums[N][2];
  if (!walk.outside()) ForColumns<N>(a, walk.column(), terms);
  while (walk.left() >= kUnroll) AddColumns<T, N, Term, kUnroll>(a, terms, &walk, sums);
#pragma unroll 1
  while (walk.left() > 0) AddColumns<T, N, Term, 1>(a, terms, &walk, sums);
  const int tid = threadIdx.x;
  const auto get = [&](int k, int i) { return Sum<double>(block[k][0][i], block[k][1][i]); };
  const auto put = [&](int k, const Sum<double>& sum) {
    block[k][0][tid] = sum.value;
    block[k][1][tid] = sum.lost;
  };
  for (int n = 0; n < N; ++n) {
    for (int k = 0; k < 2; ++k) put(k, Widen(sums[n][k]));
    __syncthreads();
    for (int half = kThreads / 2; half >= a.lanes; half /= 2) {
      for (int k = 0; k < 2 && tid < half; ++k) {
        Sum<double> sum = get(k, tid);
        sum.Join(get(k, tid + half));
        put(k, sum);
      }
      __syncthreads();
    }
    // Next, a thread overwrites its own values, which nobody else reads any more.
    if (tid < a.lanes && !walk.outside()) {
      for (int k = 0; k < 2; ++k) {
        StorePart(a, (2 * blockIdx.y + k) * walk.width() + walk.column() + n, get(k, tid));
      }
    }
  }
}

template <typename T, int N, typename Term>
__device__ inline void Reduce(const Arguments& a, bool columns) {
  if (columns) {
    ReduceColumns<T, N, Term>(a);
  } else {
    ReduceRows<T, N, Term>(a);
  }
}

// Writes or adds value(n) as the n-th value of an access.
template <typename T, int N, typename Value>
__device__ inline void Put(void* tensor, bool add, long long at, const Value& value) {
  Pack<T, N> out;
  if (add) out = Load<T, N>(tensor, at);
  for (int n = 0; n < N; ++n) {
    const Compute<T> one = value(n);
    Assign(&out.values[n], add ? out[n] + one : one);
  }
  Store<T, N>(tensor, at, out);
}

// Puts formulas[n](x, dy, fused) for the n-th value of each access.
template <typename T, int N, typename Formula, int count, typename Walk>
__device__ inline void ApplyTo(const Arguments& a, const Formula* formulas, int step, Walk* walk) {
  constexpr bool dy_too = Formula::kReadsGradient, fused_too = Formula::kFused;
  Read<T, N, Formula::kReadsData, dy_too, fused_too, count>(
      a, walk,
      [&](long long at, const Pack<T, N>& x, const Pack<T, N>& dy, const Pack<T, N>& fused) {
        if (!fused_too || a.out != nullptr) {
          Put<T, N>(a.out, a.out_add, at,
                    [&](int n) { return formulas[n * step](x[n], dy[n], fused[n]); });
        }
        if (fused_too && dy_too && a.daddend != nullptr) {
          Put<T, N>(a.daddend, a.daddend_add, at,
                    [&](int n) { return LetThrough(dy[n], fused[n]); });
        }
      });
}

template <typename T, int N, typename Formula>
__device__ void ApplyRows(const Arguments& a) {
  RowWalk<N> walk(a);
  const Formula formula(a, blockIdx.x);
  while (walk.left() >= kUnroll) ApplyTo<T, N, Formula, kUnroll>(a, &formula, 0, &walk);
#pragma unroll 1
  while (walk.left() > 0) ApplyTo<T, N, Formula, 1>(a, &formula, 0, &walk);
}

template <typename T, int N, typename Formula>
__device__ void ApplyColumns(const Arguments& a) {
  ColumnWalk<N> walk(a);
  if (walk.outside()) return;
  Formula formulas[N];
  ForColumns<N>(a, walk.column(), formulas);
  while (walk.left() >= kUnroll) ApplyTo<T, N, Formula, kUnroll>(a, formulas, 1, &walk);
#pragma unroll 1
  while (walk.left() > 0) ApplyTo<T, N, Formula, 1>(a, formulas, 1, &walk);
}

template <typename T, int N, typename Formula>
__device__ inline void Apply(const Arguments& a, bool columns) {
  if (columns) {
    ApplyColumns<T, N, Formula>(a);
  } else {
    ApplyRows<T, N, Formula>(a);
  }
}

template <typename C>
__device__ bool IsFinite(C value) {
  return value - value == 0;
}

// The two sums of a channel.
struct Sums {
  Sum<double> first, second;
};

__device__ inline Sums WarpSum(const Sums& sums) {
  return {WarpSum(sums.first), WarpSum(sums.second)};
}

// From the parts of the reduction.
__device__ inline Sums SumParts(const Arguments& a, long long channel) {
  const int lane = threadIdx.x % kWarp;
  const int columns = a.columns ? static_cast<int>(a.inner) : 1;  // then below a warp
  const long long width = a.channels * columns;
  Sums sums;
  for (int i = lane; i < a.splits * columns; i += kWarp) {
    const long long at = 2 * (i / columns) * width + channel * columns + i % columns;
    sums.first.Join(LoadPart(a, at));
    sums.second.Join(LoadPart(a, at + width));
  }
  return WarpSum(sums);
}

// From the values again, in double: for sums of float that it cannot hold, which is rare. Adds up
// add(index) for every value of the channel.
template <typename F>
__device__ __noinline__ Sums SumAgain(const Arguments& a, long long channel, const F& add) {
  Sums sums;
#pragma unroll 1
  for (long long i = threadIdx.x % kWarp; i < a.outer * a.inner; i += kWarp) {
    const long long row = i / a.inner;
    add((row * a.channels + channel) * a.inner + i - row * a.inner, &sums);
  }
  return WarpSum(sums);
}
template <typename T>
__device__ double At(const void* tensor, long long index) {
  return static_cast<double>(ToCompute(static_cast<const T*>(tensor)[index]));
}

// The channel that the calling warp finishes, which may be beyond the last.
__device__ inline long long WarpsChannel() {
  return blockIdx.x * static_cast<long long>(kThreads / kWarp) + threadIdx.x / kWarp;
}

template <typename C>
__device__ void Show(void* result, long long channel, double value, bool add) {
  if (result == nullptr) return;
  C* at = static_cast<C*>(result) + channel;
  *at = static_cast<C>(add ? static_cast<double>(*at) + value : value);
}

// moving = momentum * moving + (1 - momentum) * batch, unless the batch is not finite (also as the
// stored type sees it).
template <typename C>
__device__ void StepMoving(const Arguments& a, long long channel, double mean, double var) {
  if (!IsFinite(static_cast<C>(mean)) || !IsFinite(static_cast<C>(var))) {
    if (a.counters != nullptr) {
      atomicAdd(reinterpret_cast<unsigned long long*>(a.counters + kSkippedChannels), 1ull);
    }
    return;
  }
  C* moving_mean = static_cast<C*>(a.moving_mean) + channel;
  C* moving_var = static_cast<C*>(a.moving_var) + channel;
  const double fresh = 1 - a.momentum;
  *moving_mean = static_cast<C>(a.momentum * static_cast<double>(*moving_mean) + fresh * mean);
  *moving_var = static_cast<C>(a.momentum * static_cast<double>(*moving_var) + fresh * var);
}

// The constant of eps=0 on a channel without spread is y = beta: its 1/sqrt(0) counts as 0.
__device__ inline double InverseStd(double var, double eps) {
  const double d = var + eps;
  return d == 0 ? 0.0 : 1 / sqrt(d);  // NaN where d is negative
}

// The variance of n values whose differences from a pivot have these sums; their mean is `shift`
// off it. Where that is some deviations, the two terms cancel, so what they lack is added back.
__device__ inline double Variance(const Sums& sums, double shift, double n) {
  const double first = sums.first.Value();
  double squares = fma(-first, shift, sums.second.value);
  if (IsFinite(squares)) {
    const double of_first = (sums.first.value - first) + sums.first.lost;
    const double of_shift = fma(-shift, n, first) + of_first;
    squares += sums.second.lost - (of_first + of_shift) * shift;
  }
  return squares < 0 ? 0 : squares / n;  // negative by rounding only
}

// The statistics of the batch, from the sums of x or from what others found; false where there are
// none.
template <typename T>
__device__ bool BatchStatistics(const Arguments& a, long long channel, double* mean, double* var) {
  const double n = BatchCount(a);
  if (!(a.use_batch || a.step) || n == 0) return false;
  if (a.batch != nullptr) {
    *mean = a.batch[channel];
    *var = a.batch[a.channels + channel];
    return true;
  }
  Sums sums = SumParts(a, channel);
  double centre = static_cast<double>(Pivot<T>(a, channel));
  // Squares beyond the range of float; below it, they matter beside no eps but the smallest.
  if (!sums.second.IsFinite() || (sums.second.value < n * 1e-30 && a.eps < 1e-20)) {
    centre = At<T>(a.x, channel * a.inner);
    sums = SumAgain(a, channel, [&](long long index, Sums* each) {
      const double d = At<T>(a.x, index) - centre;
      each->first.Add(d);
      each->second.Add(d * d);
    });
  }
  const double shift = sums.first.Value() / n;
  *mean = centre + shift;
  *var = Variance(sums, shift, n);
  return true;
}

__device__ inline void WritePart(const Arguments& a, long long channel, double first, double second,
                                 bool use_batch) {
  a.part[channel] = first;
  a.part[a.channels + channel] = second;
  if (channel == 0) {
    a.part[2 * a.channels] = static_cast<double>(a.outer * a.inner);
    a.part[2 * a.channels + 1] = use_batch;
  }
}

// One warp per channel.
template <typename T>
__device__ void ForwardFinish(const Arguments& a) {
  using C = Compute<T>;
  const long long channel = WarpsChannel();
  if (channel >= a.channels) return;
  double batch_mean = 0, batch_var = 0;
  const bool of_batch = BatchStatistics<T>(a, channel, &batch_mean, &batch_var);
  if (threadIdx.x % kWarp != 0) return;
  if (a.part != nullptr) {
    WritePart(a, channel, batch_mean, batch_var, a.use_batch);
    return;
  }
  // Read before anything is stepped: one array may serve twice.
  const double gamma = Gamma<C>(a, channel);
  const double beta = static_cast<double>(static_cast<const C*>(a.beta)[channel]);
  double mean = static_cast<double>(static_cast<const C*>(a.moving_mean)[channel]);
  double var = static_cast<double>(static_cast<const C*>(a.moving_var)[channel]);
  if (of_batch && a.step) StepMoving<C>(a, channel, batch_mean, batch_var);
  if (of_batch && a.use_batch) {
    mean = batch_mean;
    var = batch_var;
  }
  const double inv_std = InverseStd(var, a.eps);
  a.saved[channel] = mean;
  a.saved[a.channels + channel] = inv_std;
  a.terms[channel] = gamma * inv_std;
  a.terms[a.channels + channel] = beta;
  if (channel == 0) {
    a.saved[2 * a.channels] = a.use_batch;
    if (a.counters != nullptr) {
      ++a.counters[a.use_batch ? kBatchForwards : kMovingForwards];
      a.counters[kStepForwards] += a.step;
    }
  }
  Show<C>(a.first, channel, mean, a.first_add);
  Show<C>(a.second, channel, inv_std, a.second_add);
}

// One warp per channel: dbeta = sum dy, dgamma = sum dy * xh.
template <typename T>
__device__ void BackwardFinish(const Arguments& a) {
  using C = Compute<T>;
  const long long channel = WarpsChannel();
  if (channel >= a.channels) return;
  Sums sums;
  if (a.batch != nullptr) {
    sums = {Sum<double>(a.batch[channel]), Sum<double>(a.batch[a.channels + channel])};
  } else if (a.outer * a.inner > 0 && NeedsSums(a)) {
    sums = SumParts(a, channel);
    if (!sums.first.IsFinite() || !sums.second.IsFinite()) {
      const double mean = a.saved[channel];
      sums = SumAgain(a, channel, [&](long long index, Sums* each) {
        double dy = At<T>(a.dy, index);
        if (a.fused != nullptr) dy = LetThrough(dy, At<T>(a.fused, index));
        each->first.Add(dy);
        each->second.Add(dy * (At<T>(a.x, index) - mean));
      });
    }
  }
  if (threadIdx.x % kWarp != 0) return;
  const double dbeta = sums.first.Value(), second = sums.second.Value();
  if (a.part != nullptr) WritePart(a, channel, dbeta, second, UsesBatch(a));
  const double dgamma = second * a.saved[a.channels + channel];
  a.terms[channel] = dbeta;
  a.terms[a.channels + channel] = dgamma;
  Show<C>(a.first, channel, a.gamma == nullptr ? 0.0 : dgamma, a.first_add);
  Show<C>(a.second, channel, dbeta, a.second_add);
}

template <typename T, int N>
__device__ void Statistics(const Arguments& a, bool columns) {
  Reduce<T, N, StatisticsTerm<T>>(a, columns);
}

template <typename T, int N>
__device__ void Forward(const Arguments& a, bool columns) {
  Apply<T, N, ForwardFormula<T>>(a, columns);
}

template <typename T, int N>
__device__ void ForwardFused(const Arguments& a, bool columns) {
  Apply<T, N, FusedForwardFormula<T>>(a, columns);
}

template <typename T, int N>
__device__ void BackwardReduce(const Arguments& a, bool columns) {
  if (NeedsSums(a)) Reduce<T, N, BackwardReduceTerm<T>>(a, columns);
}

template <typename T, int N>
__device__ void BackwardReduceFused(const Arguments& a, bool columns) {
  if (NeedsSums(a)) Reduce<T, N, BehindRelu<BackwardReduceTerm<T>>>(a, columns);
}

template <typename T, int N>
__device__ void Backward(const Arguments& a, bool columns) {
  if (UsesBatch(a)) {
    Apply<T, N, BatchBackwardFormula<T>>(a, columns);
  } else {
    Apply<T, N, MovingBackwardFormula<T>>(a, columns);
  }
}

template <typename T, int N>
__device__ void BackwardFused(const Arguments& a, bool columns) {
  if (UsesBatch(a)) {
    Apply<T, N, BehindRelu<BatchBackwardFormula<T>>>(a, columns);
  } else {
    Apply<T, N, BehindRelu<MovingBackwardFormula<T>>>(a, columns);
  }
}

}  // namespace gpu
}  // namespace mxbn

#include "batch_norm_second.cuh"

// The kernels, by names that the host can look up: mxbn_statistics_rows_float32 and so on.
#define MXBN_KERNEL(name, Function, suffix, T, columns)                        \
  extern "C" __global__ void __launch_bounds__(mxbn::gpu::kThreads)            \
      mxbn_##name##_##suffix(const mxbn::gpu::Arguments a) {                   \
    if (a.vectors) {                                                           \
      mxbn::gpu::Function<T, mxbn::gpu::kAccessBytes / sizeof(T)>(a, columns); \
    } else {                                                                   \
      mxbn::gpu::Function<T, 1>(a, columns);                                   \
    }                                                                          \
  }
#define MXBN_PLAIN_KERNEL(name, Function, suffix, T)                \
  extern "C" __global__ void __launch_bounds__(mxbn::gpu::kThreads) \
      mxbn_##name##_##suffix(const mxbn::gpu::Arguments a) {        \
    mxbn::gpu::Function<T>(a);                                      \
  }
#define MXBN_KERNELS(suffix, T)                                                    \
  MXBN_KERNEL(statistics_rows, Statistics, suffix, T, false)                       \
  MXBN_KERNEL(statistics_columns, Statistics, suffix, T, true)                     \
  MXBN_PLAIN_KERNEL(forward_finish, ForwardFinish, suffix, T)                      \
  MXBN_KERNEL(forward_rows, Forward, suffix, T, false)                             \
  MXBN_KERNEL(forward_columns, Forward, suffix, T, true)                           \
  MXBN_KERNEL(forward_fused_rows, ForwardFused, suffix, T, false)                  \
  MXBN_KERNEL(forward_fused_columns, ForwardFused, suffix, T, true)                \
  MXBN_KERNEL(backward_reduce_rows, BackwardReduce, suffix, T, false)              \
  MXBN_KERNEL(backward_reduce_columns, BackwardReduce, suffix, T, true)            \
  MXBN_KERNEL(backward_reduce_fused_rows, BackwardReduceFused, suffix, T, false)   \
  MXBN_KERNEL(backward_reduce_fused_columns, BackwardReduceFused, suffix, T, true) \
  MXBN_PLAIN_KERNEL(backward_finish, BackwardFinish, suffix, T)                    \
  MXBN_KERNEL(backward_rows, Backward, suffix, T, false)                           \
  MXBN_KERNEL(backward_columns, Backward, suffix, T, true)                         \
  MXBN_KERNEL(backward_fused_rows, BackwardFused, suffix, T, false)                \
  MXBN_KERNEL(backward_fused_columns, BackwardFused, suffix, T, true)              \
  MXBN_PLAIN_KERNEL(second_reduce, SecondReduce, suffix, T)                        \
  MXBN_PLAIN_KERNEL(second_finish, SecondFinish, suffix, T)                        \
  MXBN_PLAIN_KERNEL(second, Second, suffix, T)

MXBN_KERNELS(float16, mxbn::gpu::Half)
MXBN_KERNELS(float32, float)
MXBN_KERNELS(float64, double)
