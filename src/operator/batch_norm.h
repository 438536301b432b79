// What every half of the operator (registration, CPU, GPU) agrees on: the parameters, the view of a
// tensor, and the arguments of the passes. Plain data, no MXNet types.
#ifndef MXBN_OPERATOR_BATCH_NORM_H_
#define MXBN_OPERATOR_BATCH_NORM_H_

#include <atomic>
#include <cstdint>

namespace mxbn {

// The attributes of the operator, with MXNet's names and defaults.
struct BatchNormParam {
  double eps = 1e-3;
  double momentum = 0.9;
  int axis = 1;
  bool fix_gamma = true;
  bool use_global_stats = false;
  bool use_batch_stats = false;
  bool step_global_stats = false;
  bool output_mean_var = false;
  // What is fused into the same pass: y = act(normalized + addend).
  bool relu = false;         // act_type
  bool with_addend = false;  // there is one more input

  // The table of modes: whose statistics a forward uses ...
  bool UsesBatch(bool is_train) const { return use_batch_stats || (is_train && !use_global_stats); }
  // ... and whether it steps the moving ones.
  bool Steps(bool is_train) const { return is_train && (!use_global_stats || step_global_stats); }
  bool NeedsBatch(bool is_train) const { return UsesBatch(is_train) || Steps(is_train); }
};

// Any tensor and axis, seen as outer x channels x inner. oneDNN's blocked layout keeps `block`
// channels together, innermost: outer x (channels / block) x inner x block.
struct View {
  int64_t outer = 1;
  int64_t channels = 1;
  int64_t inner = 1;
  int64_t block = 1;

  int64_t PerChannel() const { return outer * inner; }
  int64_t Size() const { return outer * channels * inner; }
  // Where a value is in memory.
  int64_t Index(int64_t o, int64_t c, int64_t i) const {
    return ((o * (channels / block) + c / block) * inner + i) * block + c % block;
  }
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// IEEE binary16, as stored.
struct Half {
  uint16_t bits;
};

// The type of gamma, beta and the statistics, in which single values are computed too.
template <typename T>
struct ParamTypeOf {
  using type = float;
};
template <>
struct ParamTypeOf<double> {
  using type = double;
};
template <typename T>
using ParamType = typename ParamTypeOf<T>::type;

// Where a result goes: nowhere (data is null), written or added.
template <typename T>
struct Result {
  T* data = nullptr;
  bool add = false;
};

// What a forward keeps for its backward, per channel. 1/sqrt(var + eps) is 0 where var + eps is 0.
struct Saved {
  double* mean;
  double* inv_std;
};

// What is known of a part of a batch that is spread over devices and processes, or of all of it: an
// array of two values per channel (of a forward the mean, then the biased variance; of a backward
// the sum of dy, then that of dy * (x - m)), the number of values per channel, and whether the
// statistics of the batch are used at all.
inline int64_t SummarySize(int64_t channels) { return 2 * channels + 2; }

template <typename T>
struct ForwardArguments {
  using P = ParamType<T>;
  View view;
  double eps, momentum;
  bool use_batch, step;  // see BatchNormParam
  const T* x;
  const P* gamma;  // null: 1
  const P* beta;
  const T* addend;  // null: nothing is added
  bool relu;
  P* moving_mean;
  P* moving_var;
  Result<T> y;
  Saved saved;
  std::atomic<int64_t>* skipped;  // counts the channels that were not stepped; null: nobody counts
  double* part = nullptr;         // to summarize x in, which then is all that happens
  const double* batch = nullptr;  // the summary of the batch that x is a part of; null: x is it
};

template <typename T>
struct BackwardArguments {
  using P = ParamType<T>;
  View view;
  bool use_batch;  // as the forward ran
  const T* dy;
  const T* x;
  const T* y;      // the output, if a ReLU gave it, which lets dy through where y is positive
  const P* gamma;  // null: 1, and its gradient is 0
  Saved saved;
  Result<T> dx;
  Result<T> daddend;  // what is let through; asked for with y only
  Result<P> dgamma, dbeta;
  double* part = nullptr;         // to write the sums of x and dy in
  const double* batch = nullptr;  // the sums of the batch that x is a part of; null: x is it
};

// Of a loss that depends on what a backward gave: from its gradients with respect to dx, dgamma and
// dbeta to those with respect to dy, x and gamma.
template <typename T>
struct SecondArguments {
  using P = ParamType<T>;
  View view;
  bool use_batch;  // as the forward ran
  const T* ddx;
  const P* ddgamma;
  const P* ddbeta;
  const T* dy;
  const T* x;
  const P* gamma;  // null: 1, and its gradient is 0
  Saved saved;
  Result<T> for_dy, for_x;
  Result<P> for_gamma;
};

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_H_
