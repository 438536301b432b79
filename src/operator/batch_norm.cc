// The operator as MXNet sees it: attributes, shapes, types, checks, the state kept for backward,
// the gradient and the registration. The arithmetic is in batch_norm_cpu.cc.
#include <mxnet/tensor_blob.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "batch_norm_cpu.h"
#include "batch_norm_cpu_kernels.h"
#include "mxnet_abi.h"

namespace mxbn {
namespace {

using mxnet::TShape;

enum Input { kData, kGamma, kBeta, kMovingMean, kMovingVar, kInputs };
enum Output { kOutput, kMean, kInvStd, kSaved, kOutputs };
enum BackwardInput { kHeadGradient, kSavedInput, kDataInput, kGammaInput, kBackwardInputs };
enum Gradient { kDataGradient, kGammaGradient, kBetaGradient, kGradients };
const char* const kInputNames[kInputs] = {"data", "gamma", "beta", "moving_mean", "moving_var"};

[[noreturn]] void Fail(const std::string& message) {
  throw dmlc::Error("mxbn: BatchNorm: " + message);
}

// ------------------------------------------------------------------------------------ attributes

bool ToBool(const std::string& key, const std::string& value) {
  if (value == "True" || value == "true" || value == "1") return true;
  if (value == "False" || value == "false" || value == "0") return false;
  Fail(key + " is '" + value + "', expected True or False");
}

double ToDouble(const std::string& key, const std::string& value, double max,
                const char* expected) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !(number >= 0 && number <= max)) {
    Fail(key + " is '" + value + "', expected " + expected);
  }
  return number;
}

int ToInt(const std::string& key, const std::string& value) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  if (value.empty() || *end != '\0' || number < -1000 || number > 1000) {
    Fail(key + " is '" + value + "', expected the number of a dimension of data");
  }
  return static_cast<int>(number);
}

// MXNet keeps notes of its own among the attributes, such as __lr_mult__.
bool IsNote(const std::string& key) {
  return key.size() > 4 && key.compare(0, 2, "__") == 0 &&
         key.compare(key.size() - 2, 2, "__") == 0;
}

void ParseAttributes(nnvm::NodeAttrs* node_attrs) {
  abi::NodeAttrs& attrs = abi::Get(node_attrs);
  BatchNormParam param;
  for (const abi::StringMap::Node* node = attrs.dict.first; node != nullptr; node = node->next) {
    const std::string& key = node->key;
    const std::string& value = node->value;
    if (key == "eps") {
      param.eps = ToDouble(key, value, std::numeric_limits<double>::max(), "a finite number >= 0");
    } else if (key == "momentum") {
      param.momentum = ToDouble(key, value, 1, "a number from 0 to 1");
    } else if (key == "axis") {
      param.axis = ToInt(key, value);
    } else if (key == "fix_gamma") {
      param.fix_gamma = ToBool(key, value);
    } else if (key == "use_global_stats") {
      param.use_global_stats = ToBool(key, value);
    } else if (key == "use_batch_stats") {
      param.use_batch_stats = ToBool(key, value);
    } else if (key == "output_mean_var") {
      param.output_mean_var = ToBool(key, value);
    } else if (key == "cudnn_off") {
      ToBool(key, value);
    } else if (!IsNote(key)) {
      Fail("unknown attribute '" + key +
           "', expected axis, cudnn_off, eps, fix_gamma, momentum, "
           "output_mean_var, use_batch_stats or use_global_stats");
    }
  }
  if (param.use_global_stats && param.use_batch_stats) {
    Fail(
        "use_global_stats and use_batch_stats are both True, expected at most one: the statistics "
        "are either the moving ones or the batch's");
  }
  attrs.parsed = param;
}

const BatchNormParam& Param(const nnvm::NodeAttrs& attrs) {
  return nnvm::get<BatchNormParam>(abi::Get(attrs).parsed);
}

// ------------------------------------------------------------------------------ shapes and types

std::string Text(const TShape& shape) {
  std::ostringstream text;
  text << '(';
  for (int i = 0; i < shape.ndim(); ++i) text << (i > 0 ? ", " : "") << shape[i];
  text << (shape.ndim() == 1 ? ",)" : ")");
  return text.str();
}

const char* TypeName(int type) {
  switch (type) {
    case mshadow::kFloat16: return "float16";
    case mshadow::kFloat32: return "float32";
    case mshadow::kFloat64: return "float64";
    case mshadow::kUint8: return "uint8";
    case mshadow::kInt8: return "int8";
    case mshadow::kInt32: return "int32";
    case mshadow::kInt64: return "int64";
    case mshadow::kBool: return "bool";
    default: return "a type that mxbn does not know";
  }
}

int Axis(const BatchNormParam& param, const TShape& data) {
  const int axis = param.axis < 0 ? param.axis + data.ndim() : param.axis;
  if (axis < 0 || axis >= data.ndim()) {
    std::ostringstream text;
    text << "axis is " << param.axis << ", expected " << -data.ndim() << " to " << data.ndim() - 1
         << ": data " << Text(data) << " has " << data.ndim() << " dimensions";
    Fail(text.str());
  }
  return axis;
}

[[noreturn]] void FailShape(const BatchNormParam& param, int input, const TShape& shape,
                            const TShape& data) {
  const int axis = Axis(param, data);
  std::ostringstream text;
  text << kInputNames[input] << " has shape " << Text(shape) << ", expected (" << data[axis]
       << ",): data " << Text(data) << " has " << data[axis] << " channels on axis " << axis;
  Fail(text.str());
}

bool InferShape(const nnvm::NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  const BatchNormParam& param = Param(attrs);
  TShape& data = (*in)[kData];
  if (!mxnet::ndim_is_known(data)) data = (*out)[kOutput];
  if (!mxnet::ndim_is_known(data)) return false;
  if (data.ndim() == 0) Fail("data has shape (), expected at least one dimension");
  const int64_t channels = data[Axis(param, data)];
  if (!mxnet::dim_size_is_known(channels)) return false;
  if (channels == 0) Fail("data has shape " + Text(data) + ", expected at least one channel");
  const TShape per_channel(1, channels);
  for (int i = kGamma; i < kInputs; ++i) {
    TShape& shape = (*in)[i];
    const bool fits =
        !mxnet::ndim_is_known(shape) ||
        (shape.ndim() == 1 && (shape[0] == channels || !mxnet::dim_size_is_known(shape[0])));
    if (!fits) FailShape(param, i, shape, data);
    shape = per_channel;
  }
  (*out)[kOutput] = data;
  (*out)[kMean] = (*out)[kInvStd] = per_channel;
  (*out)[kSaved] = TShape(1, 2 * channels + 1);
  return mxnet::shape_is_known(data);
}

bool InferType(const nnvm::NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  int& data = (*in)[kData];
  if (data == -1) data = (*out)[kOutput];
  if (data == -1) return false;
  if (data != mshadow::kFloat16 && data != mshadow::kFloat32 && data != mshadow::kFloat64) {
    Fail(std::string("data has dtype ") + TypeName(data) +
         ", expected float16, float32 or float64");
  }
  const int param = data == mshadow::kFloat64 ? mshadow::kFloat64 : mshadow::kFloat32;
  for (int i = kGamma; i < kInputs; ++i) {
    int& type = (*in)[i];
    if (type != -1 && type != param) {
      Fail(std::string(kInputNames[i]) + " has dtype " + TypeName(type) + ", expected " +
           TypeName(param) + ": data has dtype " + TypeName(data));
    }
    type = param;
  }
  (*out)[kOutput] = data;
  (*out)[kMean] = (*out)[kInvStd] = param;
  (*out)[kSaved] = mshadow::kFloat64;
  return true;
}

bool InferStorageType(const nnvm::NodeAttrs&, const int, mxnet::DispatchMode* mode,
                      std::vector<int>* in, std::vector<int>* out) {
  for (size_t i = 0; i < in->size(); ++i) {
    int& type = (*in)[i];
    if (type == mxnet::kUndefinedStorage) type = mxnet::kDefaultStorage;
    if (type != mxnet::kDefaultStorage) {
      const char* name = type == mxnet::kCSRStorage ? "csr" : "row_sparse";
      Fail(std::string(in->size() == kInputs ? kInputNames[i] : "the head gradient") +
           " has storage type " + name + ", expected default: sparse arrays are not supported");
    }
  }
  for (int& type : *out) type = mxnet::kDefaultStorage;
  *mode = mxnet::DispatchMode::kFCompute;
  return true;
}

// --------------------------------------------------------------------------------------- compute

using Blobs = std::vector<mxnet::TBlob>;
using Requests = std::vector<mxnet::OpReqType>;

View Look(const BatchNormParam& param, const TShape& shape) {
  const int axis = Axis(param, shape);
  View view;
  for (int i = 0; i < shape.ndim(); ++i) {
    (i < axis ? view.outer : i == axis ? view.channels : view.inner) *= shape[i];
  }
  return view;
}

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

// Writes or adds the statistics used to one of the outputs that show them.
template <typename P>
void Show(const double* values, int64_t channels, const Result<P>& result) {
  if (result.data == nullptr) return;
  for (int64_t c = 0; c < channels; ++c) {
    result.data[c] = static_cast<P>(values[c] + (result.add ? result.data[c] : 0));
  }
}

// The saved output is float64 of any data: mean, 1/sqrt(var + eps), and whether the batch was used.
template <typename T>
void Forward(const BatchNormParam& param, bool is_train, const Blobs& in, const Requests& request,
             const Blobs& out) {
  using P = ParamType<T>;
  const View view = Look(param, in[kData].shape_);
  std::vector<double> unasked;
  double* saved = Pointer<double>(out[kSaved]);
  if (request[kSaved] == mxnet::kNullOp) {
    unasked.resize(2 * view.channels + 1);
    saved = unasked.data();
  }
  ForwardArguments<T> a;
  a.view = view;
  a.eps = param.eps;
  a.momentum = param.momentum;
  a.use_batch = param.UsesBatch(is_train);
  a.step = param.Steps(is_train);
  a.x = Pointer<T>(in[kData]);
  a.gamma = param.fix_gamma ? nullptr : Pointer<P>(in[kGamma]);
  a.beta = Pointer<P>(in[kBeta]);
  a.moving_mean = Pointer<P>(in[kMovingMean]);
  a.moving_var = Pointer<P>(in[kMovingVar]);
  a.y = ResultFor<T>(out[kOutput], request[kOutput]);
  a.saved = SavedIn(saved, view.channels);
  ForwardCpu(a);
  saved[2 * view.channels] = a.use_batch;
  Show(a.saved.mean, view.channels, ResultFor<P>(out[kMean], request[kMean]));
  Show(a.saved.inv_std, view.channels, ResultFor<P>(out[kInvStd], request[kInvStd]));
}

template <typename T>
void Backward(const BatchNormParam& param, const Blobs& in, const Requests& request,
              const Blobs& out) {
  using P = ParamType<T>;
  BackwardArguments<T> a;
  a.view = Look(param, in[kDataInput].shape_);
  double* saved = Pointer<double>(in[kSavedInput]);
  a.saved = SavedIn(saved, a.view.channels);
  a.use_batch = saved[2 * a.view.channels] != 0;
  a.dy = Pointer<T>(in[kHeadGradient]);
  a.x = Pointer<T>(in[kDataInput]);
  a.gamma = param.fix_gamma ? nullptr : Pointer<P>(in[kGammaInput]);
  a.dx = ResultFor<T>(out[kDataGradient], request[kDataGradient]);
  a.dgamma = ResultFor<P>(out[kGammaGradient], request[kGammaGradient]);
  a.dbeta = ResultFor<P>(out[kBetaGradient], request[kBetaGradient]);
  BackwardCpu(a);
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

void ForwardCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context, const Blobs& in,
                    const Requests& request, const Blobs& out) {
  const BatchNormParam& param = Param(attrs);
  // Shape inference takes a shape of (0,) for an unknown one, so it is refused here.
  const TShape& data = in[kData].shape_;
  for (int i = kGamma; i < kInputs; ++i) {
    if (in[i].shape_ != TShape(1, data[Axis(param, data)])) FailShape(param, i, in[i].shape_, data);
  }
  WithType(in[kData].type_flag_,
           [&](auto type) { Forward<decltype(type)>(param, context.is_train, in, request, out); });
}

void BackwardCompute(const nnvm::NodeAttrs& attrs, const mxnet::OpContext&, const Blobs& in,
                     const Requests& request, const Blobs& out) {
  WithType(in[kDataInput].type_flag_,
           [&](auto type) { Backward<decltype(type)>(Param(attrs), in, request, out); });
}

// ---------------------------------------------------------------------------------- registration

using Names = std::vector<std::string>;
using StorageInference = bool(const nnvm::NodeAttrs&, const int, mxnet::DispatchMode*,
                              std::vector<int>*, std::vector<int>*);

constexpr char kForwardName[] = "mxbn_BatchNorm";
constexpr char kBackwardName[] = "_backward_mxbn_BatchNorm";

nnvm::Op& NewOp(const char* name) {
  return dmlc::Registry<nnvm::Op>::Get()
      ->__REGISTER__(name)
      .set_attr_parser(abi::Callable<void(nnvm::NodeAttrs*)>::Wrap(ParseAttributes))
      .set_attr<mxnet::FInferStorageType>("FInferStorageType",
                                          abi::Callable<StorageInference>::Wrap(InferStorageType));
}

std::vector<nnvm::NodeEntry> Gradients(const nnvm::ObjectPtr& node,
                                       const std::vector<nnvm::NodeEntry>& head_gradients) {
  const std::vector<nnvm::NodeEntry>& inputs = abi::Get(node).inputs;
  std::vector<nnvm::NodeEntry> gradients = abi::MakeGradientNode(
      kBackwardName, node,
      {head_gradients[kOutput], nnvm::NodeEntry{node, kSaved, 0}, inputs[kData], inputs[kGamma]});
  const nnvm::ObjectPtr none = abi::MakeNoGradientNode();
  gradients.emplace_back(none, 0, 0);
  gradients.emplace_back(none, 0, 0);
  return gradients;
}

void RegisterBackward() {
  NewOp(kBackwardName)
      .set_num_inputs(kBackwardInputs)
      .set_num_outputs(kGradients)
      .set_attr<nnvm::TIsBackward>("TIsBackward", true)
      .set_attr<mxnet::FCompute>("FCompute<cpu>", BackwardCompute);
}

void RegisterForward() {
  using ShapeInference = bool(const nnvm::NodeAttrs&, mxnet::ShapeVector*, mxnet::ShapeVector*);
  using TypeInference = bool(const nnvm::NodeAttrs&, std::vector<int>*, std::vector<int>*);
  // What the built-in operator does: initial values for moving_mean (0) and moving_var (1).
  const auto initial_values =
      nnvm::Op::GetAttr<nnvm::FSetInputVarAttrOnCompose>("FSetInputVarAttrOnCompose")
          .get(nnvm::Op::Get("BatchNorm"), nullptr);
  NewOp(kForwardName)
      .describe(
          "Batch normalization with the statistics of the batch or the moving averages, as "
          "is_train,\n"
          "use_global_stats and use_batch_stats say; the gradient is that of the forward that "
          "ran.\n"
          "See mxbn.nd.BatchNorm.")
      .set_num_inputs(kInputs)
      .set_num_outputs(kOutputs)
      .set_attr<nnvm::FListInputNames>(
          "FListInputNames",
          [](const nnvm::NodeAttrs&) { return Names(kInputNames, kInputNames + kInputs); })
      .set_attr<nnvm::FListOutputNames>(
          "FListOutputNames",
          [](const nnvm::NodeAttrs&) { return Names{"output", "mean", "var", "saved"}; })
      .set_attr<nnvm::FNumVisibleOutputs>("FNumVisibleOutputs",
                                          [](const nnvm::NodeAttrs& attrs) -> uint32_t {
                                            return Param(attrs).output_mean_var ? kSaved : kMean;
                                          })
      .set_attr<nnvm::FMutateInputs>(
          "FMutateInputs",
          [](const nnvm::NodeAttrs&) { return std::vector<uint32_t>{kMovingMean, kMovingVar}; })
      .set_attr<mxnet::FInferShape>("FInferShape", abi::Callable<ShapeInference>::Wrap(InferShape))
      .set_attr<nnvm::FInferType>("FInferType", abi::Callable<TypeInference>::Wrap(InferType))
      .set_attr<mxnet::FCompute>("FCompute<cpu>", ForwardCompute)
      .set_attr<nnvm::FGradient>("FGradient", Gradients)
      .set_attr<nnvm::FSetInputVarAttrOnCompose>("FSetInputVarAttrOnCompose", initial_values)
      .add_argument("data", "NDArray-or-Symbol", "Input, of any rank from 1.")
      .add_argument("gamma", "NDArray-or-Symbol", "Scale, (channels,).")
      .add_argument("beta", "NDArray-or-Symbol", "Shift, (channels,).")
      .add_argument("moving_mean", "NDArray-or-Symbol", "Moving mean, (channels,).")
      .add_argument("moving_var", "NDArray-or-Symbol", "Moving biased variance, (channels,).")
      .add_argument("eps", "double, optional, default=0.001", "Added to the variance.")
      .add_argument("momentum", "double, optional, default=0.9",
                    "moving = momentum * moving + (1 - momentum) * batch.")
      .add_argument("fix_gamma", "boolean, optional, default=1", "Take gamma as 1.")
      .add_argument("use_global_stats", "boolean, optional, default=0",
                    "Use the moving statistics, also in training.")
      .add_argument("use_batch_stats", "boolean, optional, default=0",
                    "Use the batch's statistics, also in inference.")
      .add_argument("output_mean_var", "boolean, optional, default=0",
                    "Also return the mean and 1/sqrt(var + eps) that were used.")
      .add_argument("axis", "int, optional, default='1'", "The axis of the channels.")
      .add_argument("cudnn_off", "boolean, optional, default=0", "Accepted and ignored.");
}

}  // namespace
}  // namespace mxbn

extern "C" {

// Registers the operator, once; null, or what went wrong.
__attribute__((visibility("default"))) const char* mxbn_register() {
  static const std::string error = [] {
    try {
      mxbn::RegisterBackward();
      mxbn::RegisterForward();
      return std::string();
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
  }();
  return error.empty() ? nullptr : error.c_str();
}

__attribute__((visibility("default"))) const char* mxbn_instruction_set() {
  return mxbn::InstructionSet();
}

}  // extern "C"
