#include "batch_norm_compute.h"

#include <string>

#include "batch_norm_cpu.h"
#include "counters.h"

namespace mxbn {
namespace {

using mxnet::TShape;

template <typename T>
T* Pointer(const mxnet::TBlob& blob) {
  return static_cast<T*>(blob.dptr_);
}

template <typename T>
Result<T> ResultFor(const mxnet::TBlob& blob, mxnet::OpReqType request) {
  if (request == mxnet::kNullOp) return {};
  return {Pointer<T>(blob), request == mxnet::kAddTo};
}

Saved SavedIn(double* saved, int64_t channels) { return {saved, saved + channels}; }

// What a summary says beside the two values per channel.
void EndSummary(double* summary, const View& view, bool use_batch) {
  summary[2 * view.channels] = static_cast<double>(view.PerChannel());
  summary[2 * view.channels + 1] = use_batch;
}

// Writes or adds the statistics used to one of the outputs that show them. A Monitor looks at
// outputs that nobody requested: as the built-in operator does, they are written where they have
// memory.
template <typename T, typename P = ParamType<T>>
void Show(const double* values, int64_t channels, const mxnet::TBlob& out,
          mxnet::OpReqType request) {
  P* data = Pointer<P>(out);
  if (data == nullptr) return;
  for (int64_t c = 0; c < channels; ++c) {
    data[c] = static_cast<P>(values[c] + (request == mxnet::kAddTo ? data[c] : 0));
  }
}

// Two executors that share a layer may run at once.
void Count(long long* counter, int64_t events) {
  __atomic_fetch_add(counter, events, __ATOMIC_RELAXED);
}

// The saved output is float64 of any data: mean, 1/sqrt(var + eps), and whether the batch was used.
template <typename T>
void Forward(const NodeParam& param, bool is_train, const View& view, const Blobs& in,
             const Requests& request, const Blobs& out) {
  using P = ParamType<T>;
  std::vector<double> unasked;
  double* saved = Pointer<double>(out[kSaved]);
  if (saved == nullptr) {
    unasked.resize(2 * view.channels + 1);
    saved = unasked.data();
  }
  ForwardArguments<T> a;
  a.view = view;
  a.eps = param.eps;
  a.momentum = param.momentum;
  a.use_batch = param.UsesBatch(is_train);
  a.step = param.Steps(is_train) && !param.is_mirror;
  a.x = Pointer<T>(in[kData]);
  a.gamma = param.fix_gamma ? nullptr : Pointer<P>(in[kGamma]);
  a.beta = Pointer<P>(in[kBeta]);
  a.addend = param.with_addend ? Pointer<T>(in[kAddend]) : nullptr;
  a.relu = param.relu;
  a.moving_mean = Pointer<P>(in[kMovingMean]);
  a.moving_var = Pointer<P>(in[kMovingVar]);
  a.y = ResultFor<T>(out[kOutput], request[kOutput]);
  a.saved = SavedIn(saved, view.channels);
  if (param.is_sync()) a.batch = Pointer<double>(in[kBatchInput]);
  long long* const counters = CountersOf(a.moving_mean);
  std::atomic<int64_t> skipped{0};
  a.skipped = counters != nullptr ? &skipped : nullptr;
  ForwardCpu(a);
  if (counters != nullptr) {
    Count(&counters[a.use_batch ? kBatchForwards : kMovingForwards], 1);
    Count(&counters[kStepForwards], a.step);
    Count(&counters[kSkippedChannels], skipped);
  }
  saved[2 * view.channels] = a.use_batch;
  Show<T>(a.saved.mean, view.channels, out[kMean], request[kMean]);
  Show<T>(a.saved.inv_std, view.channels, out[kInvStd], request[kInvStd]);
}

// What a backward and its own gradient both take.
template <typename T, template <typename> class Arguments>
void TakeBackwardInputs(const NodeParam& param, const View& view, const Blobs& in,
                        Arguments<T>* a) {
  double* saved = Pointer<double>(in[kSavedInput]);
  a->view = view;
  a->saved = SavedIn(saved, view.channels);
  a->use_batch = saved[2 * view.channels] != 0;
  a->dy = Pointer<T>(in[kHeadGradient]);
  a->x = Pointer<T>(in[kDataInput]);
  a->gamma = param.fix_gamma ? nullptr : Pointer<ParamType<T>>(in[kGammaInput]);
}

template <typename T>
void Backward(const NodeParam& param, const View& view, const Blobs& in, const Requests& request,
              const Blobs& out) {
  using P = ParamType<T>;
  BackwardArguments<T> a;
  TakeBackwardInputs(param, view, in, &a);
  a.y = param.relu ? Pointer<T>(in[kOutputInput]) : nullptr;
  a.dx = ResultFor<T>(out[kDataGradient], request[kDataGradient]);
  a.dgamma = ResultFor<P>(out[kGammaGradient], request[kGammaGradient]);
  a.dbeta = ResultFor<P>(out[kBetaGradient], request[kBetaGradient]);
  const bool is_sync = param.is_sync();
  if (is_sync && in.size() > kBatchSumsInput) a.batch = Pointer<double>(in[kBatchSumsInput]);
  if (is_sync && out.size() > kPartSums && request[kPartSums] != mxnet::kNullOp) {
    a.part = Pointer<double>(out[kPartSums]);
  }
  if (!is_sync && out.size() > kAddendGradient) {
    a.daddend = ResultFor<T>(out[kAddendGradient], request[kAddendGradient]);
  }
  BackwardCpu(a);
  if (a.part != nullptr) EndSummary(a.part, view, a.use_batch);
}

template <typename T>
void Statistics(const NodeParam& param, bool is_train, const View& view, const Blobs& in,
                const Blobs& out) {
  ForwardArguments<T> a{};
  a.view = view;
  a.use_batch = param.NeedsBatch(is_train);
  a.x = Pointer<T>(in[kData]);
  a.part = Pointer<double>(out[0]);
  ForwardCpu(a);
  EndSummary(a.part, view, a.use_batch);
}

template <typename T>
void Second(const NodeParam& param, const View& view, const Blobs& heads, const Blobs& in,
            const Requests& request, const Blobs& out) {
  using P = ParamType<T>;
  SecondArguments<T> a;
  TakeBackwardInputs(param, view, in, &a);
  a.ddx = Pointer<T>(heads[kDataGradient]);
  a.ddgamma = Pointer<P>(heads[kGammaGradient]);
  a.ddbeta = Pointer<P>(heads[kBetaGradient]);
  a.for_dy = ResultFor<T>(out[kForHeadGradient], request[kForHeadGradient]);
  a.for_x = ResultFor<T>(out[kForData], request[kForData]);
  a.for_gamma = ResultFor<P>(out[kForGamma], request[kForGamma]);
  SecondCpu(a);
}

// Calls f with a value of the C++ type of `type`. MXNet's engine survives a dmlc::Error only.
template <typename F>
void WithType(int type, F f) {
  try {
    switch (type) {
      case mshadow::kFloat16: return f(Half());
      case mshadow::kFloat32: return f(float());
      case mshadow::kFloat64: return f(double());
      default: Fail(std::string("data has dtype ") + TypeName(type));
    }
  } catch (const dmlc::Error&) {
    throw;
  } catch (const std::exception& error) {
    Fail(error.what());
  }
}

std::string DeviceOf(const mxnet::TBlob& array) {
  return DeviceName(array.dev_mask(), array.dev_id());
}

// MXNet checks where arguments are, but neither auxiliary states nor head gradients.
void CheckDevice(const std::string& name, const mxnet::TBlob& array, const mxnet::TBlob& data) {
  const bool same_kind = array.dev_mask() == data.dev_mask();
  if (same_kind &&
      (array.dev_mask() == mshadow::cpu::kDevMask || array.dev_id() == data.dev_id())) {
    return;
  }
  Fail(name + " is on " + DeviceOf(array) + ", expected " + DeviceOf(data) + ", where data is");
}

// Recorded calls hand a head gradient over as the user gave it.
void CheckLike(const std::string& name, const mxnet::TBlob& array, const mxnet::TBlob& like,
               const std::string& like_name, const mxnet::TBlob& data) {
  CheckDevice(name, array, data);
  if (array.shape_ != like.shape_) {
    Fail(name + " has shape " + Text(array.shape_) + ", expected " + Text(like.shape_) + " like " +
         like_name);
  }
  if (array.type_flag_ != like.type_flag_) {
    Fail(name + " has dtype " + TypeName(array.type_flag_) + ", expected " +
         TypeName(like.type_flag_) + " like " + like_name);
  }
}

}  // namespace

View PlainView(const BatchNormParam& param, const TShape& shape) {
  const int axis = Axis(param, shape);
  View view;
  for (int i = 0; i < shape.ndim(); ++i) {
    (i < axis ? view.outer : i == axis ? view.channels : view.inner) *= shape[i];
  }
  return view;
}

bool CheckForward(const NodeParam& param, bool is_train, const Blobs& in) {
  // Shape inference takes a shape of (0,) for an unknown one, so it is refused here.
  const TShape& data = in[kData].shape_;
  const TShape expected(1, data[Axis(param, data)]);
  for (size_t i = kGamma; i < in.size(); ++i) {
    if (i != kAddend && in[i].shape_ != expected) FailShape(param, i, in[i].shape_, data);
    CheckDevice(InputName(param, i), in[i], in[kData]);
  }
  if (param.with_addend) CheckLike("addend", in[kAddend], in[kData], "data", in[kData]);
  if (param.is_mirror) return param.modes->Get(in[kMovingMean].dptr_);
  if (param.modes != nullptr) param.modes->Put(in[kMovingMean].dptr_, is_train);
  return is_train;
}

void CheckBackward(const Blobs& in) {
  CheckLike("the head gradient", in[kHeadGradient], in[kDataInput], "data", in[kDataInput]);
}

void CheckSecond(const Blobs& heads, const Blobs& in) {
  const mxnet::TBlob &data = in[kDataInput], &gamma = in[kGammaInput];
  CheckLike("the head gradient of data's gradient", heads[kDataGradient], data, "data", data);
  CheckLike("the head gradient of gamma's gradient", heads[kGammaGradient], gamma, "gamma", data);
  CheckLike("the head gradient of beta's gradient", heads[kBetaGradient], gamma, "gamma", data);
}

void RunForward(const NodeParam& param, bool is_train, const View& view, const Blobs& in,
                const Requests& request, const Blobs& out) {
  is_train = CheckForward(param, is_train, in);
  WithType(in[kData].type_flag_,
           [&](auto type) { Forward<decltype(type)>(param, is_train, view, in, request, out); });
}

void RunBackward(const NodeParam& param, const View& view, const Blobs& in, const Requests& request,
                 const Blobs& out) {
  CheckBackward(in);
  WithType(in[kDataInput].type_flag_,
           [&](auto type) { Backward<decltype(type)>(param, view, in, request, out); });
}

void RunStatistics(const NodeParam& param, bool is_train, const View& view, const Blobs& in,
                   const Blobs& out) {
  WithType(in[kData].type_flag_,
           [&](auto type) { Statistics<decltype(type)>(param, is_train, view, in, out); });
}

void ForwardCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context, const Blobs& in,
                    const Requests& request, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  RunForward(param, context.is_train, PlainView(param, in[kData].shape_), in, request, out);
}

void StatisticsCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                       const Blobs& in, const Requests&, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  RunStatistics(param, context.is_train, PlainView(param, in[kData].shape_), in, out);
}

void BackwardCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext&, const Blobs& in,
                     const Requests& request, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  RunBackward(param, PlainView(param, in[kDataInput].shape_), in, request, out);
}

void SecondCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext&, const Blobs& in,
                   const Requests& request, const Blobs& out) {
  const NodeParam& param = Param(attrs);
  const Blobs heads = HeadsOf(in), backward_in = BackwardInputsOf(in);
  CheckSecond(heads, backward_in);
  const View view = PlainView(param, backward_in[kDataInput].shape_);
  WithType(backward_in[kDataInput].type_flag_, [&](auto type) {
    Second<decltype(type)>(param, view, heads, backward_in, request, out);
  });
}

}  // namespace mxbn
