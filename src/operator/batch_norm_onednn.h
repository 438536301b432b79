// FComputeEx<cpu> of the operators and of the gradient: arrays between convolutions stay in
// oneDNN's layouts; any other array is brought into MXNet's plain layout and goes the way of
// FCompute.
#ifndef MXBN_OPERATOR_BATCH_NORM_ONEDNN_H_
#define MXBN_OPERATOR_BATCH_NORM_ONEDNN_H_

#include <mxnet/ndarray.h>

#include <atomic>
#include <vector>

#include "batch_norm_compute.h"

namespace mxbn {

using Arrays = std::vector<mxnet::NDArray>;

// Whether to; set when the self-test has been passed.
extern std::atomic<bool> use_onednn_layouts;
// How many passes ran on such a layout.
extern std::atomic<int64_t> onednn_layout_passes;

void ForwardComputeEx(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                      const Arrays& in, const Requests& request, const Arrays& out);
void StatisticsComputeEx(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                         const Arrays& in, const Requests& request, const Arrays& out);
void BackwardComputeEx(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                       const Arrays& in, const Requests& request, const Arrays& out);

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_ONEDNN_H_
