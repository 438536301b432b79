// BatchNorm on a CPU, on plain pointers; T is Half, float or double.
#ifndef MXBN_OPERATOR_BATCH_NORM_CPU_H_
#define MXBN_OPERATOR_BATCH_NORM_CPU_H_

#include "batch_norm.h"

namespace mxbn {

// y = relu((x - m) / sqrt(v + eps) * gamma + beta + addend), the last two if they are asked for,
// and the step of the moving statistics. y may be x or addend.
template <typename T>
void ForwardCpu(const ForwardArguments<T>& arguments);

// The gradients of that forward, from what it saved. dx or daddend may be dy.
template <typename T>
void BackwardCpu(const BackwardArguments<T>& arguments);

// The gradients of that backward. The results lie apart from the arguments.
template <typename T>
void SecondCpu(const SecondArguments<T>& arguments);

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_CPU_H_
