// What the kernels in batch_norm_kernels.cuh are given: the one argument of each, by value. Host
// code and the three compilers of the device code read this file, so it includes nothing.
#ifndef MXBN_OPERATOR_BATCH_NORM_GPU_ARGUMENTS_H_
#define MXBN_OPERATOR_BATCH_NORM_GPU_ARGUMENTS_H_

namespace mxbn {
namespace gpu {

constexpr int kThreads = 256;     // of a block
constexpr int kWarp = 32;         // threads that run together
constexpr int kAccessBytes = 16;  // of a vector access

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
  double* parts;  // sums[split][2][width], width being channels or, in columns, with inner
  double* terms;  // what the second step needs, twice per channel: a forward's scale and
                  // offset, a backward's sums of dy and of dy * xh

  // The first and second result per channel, null where there is no memory for them: the mean and
  // 1/sqrt(var + eps) that a forward shows, the gradients of gamma and beta.
  void* first;
  void* second;
  int out_add, first_add, second_add;  // added to what is there, not written

  long long* counters;  // what guarded training counts (counter.h); null: nothing

  // Where x is a part of a batch that is spread over devices: see SummarySize in batch_norm.h.
  double* part;         // to write the part's statistics or sums in; null: not wanted
  const double* batch;  // those of the whole batch; null: x is it
};

}  // namespace gpu
}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_GPU_ARGUMENTS_H_
