// What the kernels in batch_norm_kernels.cuh are given: the one argument of each, by value. Host
// code and the three compilers of the device code read this file, so it includes nothing.
#ifndef MXBN_OPERATOR_BATCH_NORM_GPU_ARGUMENTS_H_
#define MXBN_OPERATOR_BATCH_NORM_GPU_ARGUMENTS_H_

namespace mxbn {
namespace gpu {

constexpr int kThreads = 256;     // of a block
constexpr int kWarp = 32;         // threads that run together
constexpr int kAccessBytes = 16;  // of a vector access
constexpr int kSecondSums = 5;    // of a channel, for the second derivatives
constexpr int kSecondTerms = 6;
constexpr int kSecondValues = 8;  // of a thread

// All pointers are to device memory. The types of data and parameters follow from the kernel.
struct Arguments {
  // The tensor, seen as outer x channels x inner.
  long long outer, channels, inner;

  // How it is cut, from its shape alone: see MakePlan. Rows: `piece` accesses of one channel per
  // block. Columns: `piece` rows and `lanes` accesses of each per block.
  int vectors;  // accesses are of 16 bytes, not of one value
  int columns;  // which kernels run, rows or columns
  int lanes;    // columns: threads side by side, a power of two up to 32
  long long piece;
  int splits;  // pieces of a channel, or of the rows

  const void* x;
  const void* dy;
  void* out;          // y or dx; null: not wanted
  const void* gamma;  // null: 1, and its gradient is 0
  const void* beta;
  void* moving_mean;
  void* moving_var;
  double eps, momentum;
  int use_batch, step;  // of a forward; a backward finds in `saved` what the forward did

  double* saved;  // mean, 1/sqrt(var + eps), and one value: whether the batch was used
  double* parts;  // sums[split][2][width][2], width being channels or, in columns, with inner;
                  // each is a value and what its additions lost
  double* terms;  // what the second step needs, twice per channel: a forward's scale and
                  // offset, a backward's sums of dy and of dy * xh

  // The first and second result per channel, null where there is no memory for them: the mean and
  // 1/sqrt(var + eps) that a forward shows, the gradients of gamma and beta.
  void* first;
  void* second;
  int out_add, first_add, second_add;  // added to what is there, not written

  // What is fused into a pass. A forward adds a tensor and applies a ReLU; a backward of one with a
  // ReLU looks at the output y that it gave.
  const void* fused;  // the addend, null: none; or y, null: no ReLU
  int relu;           // of a forward
  void* daddend;      // the gradient of the addend, with y only; null: not wanted
  int daddend_add;

  long long* counters;  // what guarded training counts (counter.h); null: nothing

  // Of the second derivatives alone. Their other results are `out`, for x, and `first`, for gamma.
  int second_order;
  const void* ddx;
  const void* ddgamma;
  const void* ddbeta;
  void* for_dy;
  int for_dy_add;

  // Where x is a part of a batch that is spread over devices: see SummarySize in batch_norm.h.
  double* part;         // to write the part's statistics or sums in; null: not wanted
  const double* batch;  // those of the whole batch; null: x is it
};

}  // namespace gpu
}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_GPU_ARGUMENTS_H_
