// BatchNorm on a GPU: how the kernels of batch_norm_kernels.cuh are run, on plain pointers to
// device memory.
#ifndef MXBN_OPERATOR_BATCH_NORM_GPU_H_
#define MXBN_OPERATOR_BATCH_NORM_GPU_H_

#include <cstddef>

#include "batch_norm.h"
#include "batch_norm_gpu_arguments.h"

namespace mxbn {
namespace gpu {

enum DataType { kFloat16, kFloat32, kFloat64 };

// Where kernels run: MXNet's number of the GPU, and the CUDA stream.
struct Queue {
  int device;
  void* stream;
};

// Decides how the tensor is cut, from its shape, and with which accesses, from x, dy, out, fused
// and daddend, which must have been set, as must second_order.
void MakePlan(const View& view, DataType type, Arguments* arguments);

// The doubles that arguments->parts and arguments->terms must have, after MakePlan.
size_t PartsSize(const Arguments& arguments);
size_t TermsSize(const Arguments& arguments);

// Start the passes, on arguments that are complete. They throw std::runtime_error.
void Forward(const Arguments& arguments, DataType type, const Queue& queue);
void Backward(const Arguments& arguments, DataType type, const Queue& queue);
void Second(const Arguments& arguments, DataType type, const Queue& queue);

}  // namespace gpu
}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_GPU_H_
