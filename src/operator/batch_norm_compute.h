// From MXNet's arrays and requests to the arithmetic in batch_norm_cpu.h and batch_norm_gpu.h.
#ifndef MXBN_OPERATOR_BATCH_NORM_COMPUTE_H_
#define MXBN_OPERATOR_BATCH_NORM_COMPUTE_H_

#include <mxnet/tensor_blob.h>

#include <vector>

#include "batch_norm_infer.h"

namespace mxbn {

using Blobs = std::vector<mxnet::TBlob>;
using Requests = std::vector<mxnet::OpReqType>;

// The view of a tensor in MXNet's plain layout.
View PlainView(const BatchNormParam& param, const mxnet::TShape& shape);

// Refuse arrays that do not fit each other. CheckForward returns the mode in which to run:
// is_train, or that of the forward which a mirror repeats.
bool CheckForward(const NodeParam& param, bool is_train, const Blobs& in);
void CheckBackward(const Blobs& in);
void CheckSecond(const Blobs& heads, const Blobs& in);

// What the backward's gradient is given, in its two parts: for each gradient that the backward
// gave, and what the backward was given.
inline Blobs HeadsOf(const Blobs& in) { return Blobs(in.begin(), in.begin() + kAddendGradient); }
inline Blobs BackwardInputsOf(const Blobs& in) {
  return Blobs(in.begin() + kAddendGradient, in.end());
}

// The two passes on a CPU, and the summary of data alone, on data (and output, head gradient,
// gradient of data) as `view` says.
void RunForward(const NodeParam& param, bool is_train, const View& view, const Blobs& in,
                const Requests& request, const Blobs& out);
void RunBackward(const NodeParam& param, const View& view, const Blobs& in, const Requests& request,
                 const Blobs& out);
void RunStatistics(const NodeParam& param, bool is_train, const View& view, const Blobs& in,
                   const Blobs& out);

// FCompute<cpu> of the operator, of the statistics alone, of the gradient, and of that one's
// gradient.
void ForwardCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context, const Blobs& in,
                    const Requests& request, const Blobs& out);
void StatisticsCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                       const Blobs& in, const Requests& request, const Blobs& out);
void BackwardCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context, const Blobs& in,
                     const Requests& request, const Blobs& out);
void SecondCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context, const Blobs& in,
                   const Requests& request, const Blobs& out);

// FCompute<gpu>, and the workspace that it asks MXNet for.
void ForwardComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                       const Blobs& in, const Requests& request, const Blobs& out);
void StatisticsComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                          const Blobs& in, const Requests& request, const Blobs& out);
void BackwardComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                        const Blobs& in, const Requests& request, const Blobs& out);
void SecondComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                      const Blobs& in, const Requests& request, const Blobs& out);
std::vector<mxnet::ResourceRequest> Workspace(const nnvm::NodeAttrs& attrs, const int dev_mask,
                                              const mxnet::DispatchMode mode);

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_COMPUTE_H_
