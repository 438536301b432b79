// The inner loops of BatchNorm on a CPU: plain pointers, no threads, no allocation. They are
// compiled once per instruction set; SelectKernels picks the best set that the processor has.
#ifndef MXBN_OPERATOR_BATCH_NORM_CPU_KERNELS_H_
#define MXBN_OPERATOR_BATCH_NORM_CPU_KERNELS_H_

#include <cstdint>

#include "batch_norm.h"

namespace mxbn {

// Rows of contiguous values, `stride` values apart.
struct Slab {
  int64_t rows;
  int64_t cols;
  int64_t stride;
};

// A slab belongs to one channel (its parameters are single values), or every column of it has
// parameters of its own (they are arrays).
enum Layout { kOneChannel = 0, kColumns = 1 };

// What becomes of a result: it replaces what is there, past the caches (for tensors that these
// could not hold until they are read) or not, or is added to it.
enum class Write { kStore, kStream, kAdd };

// What the steps read of a slab. Where a ReLU follows the normalization, y is its output, which
// lets g of dy through: dy where y > 0, NaN where y is NaN, as in MXNet's ReLU, else 0. Otherwise g
// = dy.
template <typename T>
struct ForwardInputs {
  const T* x;
  const T* addend;  // null: nothing is added
  bool relu;
};
template <typename T>
struct BackwardInputs {
  const T* x;  // null: of no use
  const T* dy;
  const T* y;  // null: no ReLU
};

// Tables of parameters: table[term * terms_stride + column].
enum ForwardTerm { kMeanHigh, kMeanLow, kScale, kOffset, kForwardTerms };
enum BackwardTerm { kSlope = kOffset, kShiftHigh, kShiftLow, kBackwardTerms };

template <typename T>
struct Kernels {
  using C = ParamType<T>;

  // Statistics: adds to sums[0] the sum of x - centre and to sums[sums_stride] that of its squares,
  // in double.
  using Statistics = void (*)(const Slab&, const T* x, const double* centre, double* sums,
                              int64_t sums_stride);
  // Forward: y = ((x - mean_high) - mean_low) * scale + offset, then plus addend, then the ReLU.
  // Subtracting first and the mean in two parts keep what x * scale + (offset - mean * scale) would
  // cancel.
  using Forward = void (*)(const Slab&, const ForwardInputs<T>& in, const C* terms,
                           int64_t terms_stride, T* y, Write write);
  // BackwardReduce: adds to sums[0] the sum of g and to sums[sums_stride] that of
  // g * (x - centre), in double.
  using BackwardReduce = void (*)(const Slab&, const BackwardInputs<T>& in, const double* centre,
                                  double* sums, int64_t sums_stride);
  // Backward: dx = scale * ((g - shift_high) - (((x - mean_high) - mean_low) * slope +
  // shift_low)), or, where x is null, dx = scale * g.
  using Backward = void (*)(const Slab&, const BackwardInputs<T>& in, const C* terms,
                            int64_t terms_stride, T* dx, Write write);
  // Mask: daddend = g, with a ReLU.
  using Mask = void (*)(const Slab&, const BackwardInputs<T>& in, T* daddend, Write write);

  C (*to_compute)(T value);
  // By Layout.
  Statistics statistics[2];
  Forward forward[2];
  BackwardReduce backward_reduce[2];
  Backward backward[2];
  Mask mask[2];
};

template <typename T>
const Kernels<T>& SelectKernels();

// The name of the instruction set in use: "avx512", "avx2" or "baseline".
const char* InstructionSet();

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_CPU_KERNELS_H_
