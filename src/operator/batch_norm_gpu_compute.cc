// FCompute<gpu>: the passes are started on MXNet's stream, which its engine waits for.
#include "batch_norm_compute.h"
#include "batch_norm_gpu.h"
#include "counters.h"

namespace mxbn {
namespace {

gpu::DataType DataTypeOf(int type) {
  switch (type) {
    case mshadow::kFloat16: return gpu::kFloat16;
    case mshadow::kFloat32: return gpu::kFloat32;
    case mshadow::kFloat64: return gpu::kFloat64;
    default: Fail(std::string("data has dtype ") + TypeName(type));
  }
}

// Where a result goes: null if it is not wanted.
void* Wanted(const mxnet::TBlob& blob, mxnet::OpReqType request) {
  return request == mxnet::kNullOp ? nullptr : blob.dptr_;
}

gpu::Queue QueueOf(const mxnet::OpContext& context) {
  // The first member of MXNet's stream object is the cudaStream_t.
  return {context.run_ctx.ctx.dev_id, *static_cast<void**>(context.run_ctx.stream)};
}

// Hands out MXNet's workspace for parts, terms and, if nobody keeps it, the saved output.
void SetWorkspace(const mxnet::OpContext& context, gpu::Arguments* a) {
  const size_t parts = gpu::PartsSize(*a), terms = gpu::TermsSize(*a);
  const size_t saved = a->saved == nullptr ? 2 * a->channels + 1 : 0;
  a->parts = static_cast<double*>(
      context.requested[0].get_space_internal((parts + terms + saved) * sizeof(double)));
  a->terms = a->parts + parts;
  if (saved > 0) a->saved = a->terms + terms;
}

// Starts a pass, whose workspace is still to be had. What goes wrong becomes an error that names
// the GPU and that MXNet survives.
template <typename Pass>
void Run(Pass pass, const mxnet::OpContext& context, gpu::DataType type, gpu::Arguments* a) {
  const mxnet::Context& device = context.run_ctx.ctx;
  try {
    SetWorkspace(context, a);
    pass(*a, type, QueueOf(context));
  } catch (const std::runtime_error& error) {
    Fail("on " + DeviceName(device.dev_mask(), device.dev_id) + ": " + error.what());
  }
}

}  // namespace

std::vector<mxnet::ResourceRequest> Workspace(const nnvm::NodeAttrs&, const int dev_mask,
                                              const mxnet::DispatchMode) {
  if (dev_mask != mshadow::gpu::kDevMask) return {};
  return {mxnet::ResourceRequest::kTempSpace};
}

void ForwardComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                       const Blobs& in, const Requests& request, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  const bool is_train = CheckForward(param, context.is_train, in);
  const gpu::DataType type = DataTypeOf(in[kData].type_flag_);
  gpu::Arguments a{};
  a.x = in[kData].dptr_;
  a.out = Wanted(out[kOutput], request[kOutput]);
  a.out_add = request[kOutput] == mxnet::kAddTo;
  a.fused = param.with_addend ? in[kAddend].dptr_ : nullptr;
  a.relu = param.relu;
  gpu::MakePlan(PlainView(param, in[kData].shape_), type, &a);
  a.gamma = param.fix_gamma ? nullptr : in[kGamma].dptr_;
  a.beta = in[kBeta].dptr_;
  a.moving_mean = in[kMovingMean].dptr_;
  a.moving_var = in[kMovingVar].dptr_;
  a.eps = param.eps;
  a.momentum = param.momentum;
  a.use_batch = param.UsesBatch(is_train);
  a.step = param.Steps(is_train) && !param.is_mirror;
  a.counters = CountersOf(a.moving_mean);
  a.saved = static_cast<double*>(out[kSaved].dptr_);
  // A Monitor looks at outputs that nobody requested: these are written where they have memory.
  a.first = out[kMean].dptr_;
  a.first_add = request[kMean] == mxnet::kAddTo;
  a.second = out[kInvStd].dptr_;
  a.second_add = request[kInvStd] == mxnet::kAddTo;
  if (param.is_sync()) a.batch = static_cast<double*>(in[kBatchInput].dptr_);
  Run(gpu::Forward, context, type, &a);
}

void StatisticsComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                          const Blobs& in, const Requests&, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  const gpu::DataType type = DataTypeOf(in[kData].type_flag_);
  gpu::Arguments a{};
  a.x = in[kData].dptr_;
  gpu::MakePlan(PlainView(param, in[kData].shape_), type, &a);
  a.eps = param.eps;
  a.use_batch = param.NeedsBatch(context.is_train);
  a.part = static_cast<double*>(out[0].dptr_);
  Run(gpu::Forward, context, type, &a);
}

void BackwardComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                        const Blobs& in, const Requests& request, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  CheckBackward(in);
  const gpu::DataType type = DataTypeOf(in[kDataInput].type_flag_);
  gpu::Arguments a{};
  a.x = in[kDataInput].dptr_;
  a.dy = in[kHeadGradient].dptr_;
  a.out = Wanted(out[kDataGradient], request[kDataGradient]);
  a.out_add = request[kDataGradient] == mxnet::kAddTo;
  a.fused = param.relu ? in[kOutputInput].dptr_ : nullptr;
  const bool is_sync = param.is_sync();
  if (!is_sync && out.size() > kAddendGradient) {
    a.daddend = Wanted(out[kAddendGradient], request[kAddendGradient]);
    a.daddend_add = request[kAddendGradient] == mxnet::kAddTo;
  }
  gpu::MakePlan(PlainView(param, in[kDataInput].shape_), type, &a);
  a.gamma = param.fix_gamma ? nullptr : in[kGammaInput].dptr_;
  a.saved = static_cast<double*>(in[kSavedInput].dptr_);
  a.first = Wanted(out[kGammaGradient], request[kGammaGradient]);
  a.first_add = request[kGammaGradient] == mxnet::kAddTo;
  a.second = Wanted(out[kBetaGradient], request[kBetaGradient]);
  a.second_add = request[kBetaGradient] == mxnet::kAddTo;
  if (is_sync && in.size() > kBatchSumsInput) {
    a.batch = static_cast<double*>(in[kBatchSumsInput].dptr_);
  }
  if (is_sync && out.size() > kPartSums) {
    a.part = static_cast<double*>(Wanted(out[kPartSums], request[kPartSums]));
  }
  Run(gpu::Backward, context, type, &a);
}

void SecondComputeGpu(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                      const Blobs& in, const Requests& request, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  const Blobs heads = HeadsOf(in), backward_in = BackwardInputsOf(in);
  CheckSecond(heads, backward_in);
  const mxnet::TBlob& data = backward_in[kDataInput];
  const gpu::DataType type = DataTypeOf(data.type_flag_);
  gpu::Arguments a{};
  a.second_order = 1;
  a.ddx = heads[kDataGradient].dptr_;
  a.ddgamma = heads[kGammaGradient].dptr_;
  a.ddbeta = heads[kBetaGradient].dptr_;
  a.dy = backward_in[kHeadGradient].dptr_;
  a.x = data.dptr_;
  a.gamma = param.fix_gamma ? nullptr : backward_in[kGammaInput].dptr_;
  a.saved = static_cast<double*>(backward_in[kSavedInput].dptr_);
  a.for_dy = Wanted(out[kForHeadGradient], request[kForHeadGradient]);
  a.for_dy_add = request[kForHeadGradient] == mxnet::kAddTo;
  a.out = Wanted(out[kForData], request[kForData]);
  a.out_add = request[kForData] == mxnet::kAddTo;
  a.first = Wanted(out[kForGamma], request[kForGamma]);
  a.first_add = request[kForGamma] == mxnet::kAddTo;
  gpu::MakePlan(PlainView(param, data.shape_), type, &a);
  Run(gpu::Second, context, type, &a);
}

}  // namespace mxbn
