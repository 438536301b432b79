// The operator as MXNet sees it: its registration and its gradients.
#include <string>
#include <vector>

#include "batch_norm_compute.h"
#include "batch_norm_cpu_kernels.h"
#include "batch_norm_infer.h"
#include "batch_norm_onednn.h"
#include "batch_norm_register.h"
#include "mxnet_abi.h"

namespace mxbn {

using Names = std::vector<std::string>;
using WorkspaceRequest = std::vector<mxnet::ResourceRequest>(const nnvm::NodeAttrs&, const int,
                                                             const mxnet::DispatchMode);

constexpr char kForwardName[] = "mxbn_BatchNorm";
constexpr char kBackwardName[] = "_backward_mxbn_BatchNorm";
constexpr char kSecondName[] = "_backward_backward_mxbn_BatchNorm";

nnvm::Op& NewOp(const char* name, Parser* parser, StorageInference* infer_storage) {
  return dmlc::Registry<nnvm::Op>::Get()
      ->__REGISTER__(name)
      .set_attr_parser(abi::Callable<Parser>::Wrap(parser))
      .set_attr<mxnet::FInferStorageType>("FInferStorageType",
                                          abi::Callable<StorageInference>::Wrap(infer_storage))
      .set_attr<mxnet::FResourceRequestEx>("FResourceRequestEx",
                                           abi::Callable<WorkspaceRequest>::Wrap(Workspace));
}

namespace {

std::vector<nnvm::NodeEntry> Gradients(const nnvm::ObjectPtr& node,
                                       const std::vector<nnvm::NodeEntry>& head_gradients) {
  PrepareIfMirror(node);
  const std::vector<nnvm::NodeEntry>& inputs = abi::Get(node.get()).inputs;
  const NodeParam& param = Param(node->attrs);
  CheckInputs(node->attrs, inputs.size());
  std::vector<nnvm::NodeEntry> backward_inputs = {
      head_gradients[kOutput], nnvm::NodeEntry{node, kSaved, 0}, inputs[kData], inputs[kGamma]};
  if (param.relu) backward_inputs.push_back(nnvm::NodeEntry{node, kOutput, 0});
  std::vector<nnvm::NodeEntry> gradients =
      abi::MakeGradientNode(kBackwardName, node, backward_inputs);
  const nnvm::ObjectPtr none = abi::MakeNoGradientNode();
  gradients.insert(gradients.begin() + kAddendGradient, 2, nnvm::NodeEntry{none, 0, 0});
  if (param.with_addend && !param.relu) {
    const std::string name = abi::Get(node.get()).attrs.name + "_addend_backward";
    gradients.emplace_back(abi::MakeNode("_copy", name, {head_gradients[kOutput]}), 0, 0);
  }
  return gradients;
}

// The gradients of a backward. None flows to `saved`: how mean and variance depend on data is part
// of the gradient of data.
std::vector<nnvm::NodeEntry> SecondGradients(const nnvm::ObjectPtr& node,
                                             const std::vector<nnvm::NodeEntry>& head_gradients) {
  using Entry = nnvm::NodeEntry;
  const abi::Node& backward = abi::Get(node.get());
  const bool relu = Param(node->attrs).relu;
  const auto make = [&](const char* op_name, const char* suffix, const std::vector<Entry>& inputs) {
    return Entry{abi::MakeNode(op_name, backward.attrs.name + suffix, inputs), 0, 0};
  };
  // What a ReLU lets through takes the place of dy, and is the gradient of the addend.
  const auto let_through = [&](const Entry& gradient, const char* suffix) {
    return make("_backward_relu", suffix, {gradient, backward.inputs[kOutputInput]});
  };
  std::vector<Entry> inputs(head_gradients.begin(), head_gradients.begin() + kAddendGradient);
  inputs.insert(inputs.end(), backward.inputs.begin(), backward.inputs.begin() + kOutputInput);
  if (relu) {
    Entry& dy = inputs[kAddendGradient + kHeadGradient];
    dy = let_through(dy, "_relu");
  }
  const std::vector<Entry> gradients = abi::MakeGradientNode(kSecondName, node, inputs);
  Entry for_dy = gradients[kForHeadGradient];
  if (head_gradients.size() > kAddendGradient) {
    for_dy = make("elemwise_add", "_addend", {for_dy, head_gradients[kAddendGradient]});
  }
  if (relu) for_dy = let_through(for_dy, "_relu_backward");
  std::vector<Entry> result = {for_dy, Entry{abi::MakeNoGradientNode(), 0, 0}, gradients[kForData],
                               gradients[kForGamma]};
  // The output has other gradients, to which this one is added.
  if (relu) {
    result.push_back(make("zeros_like", "_output_backward", {backward.inputs[kOutputInput]}));
  }
  return result;
}

// MXNet also asks for these, with head gradients that have no nodes, when it records what may never
// be differentiated.
std::vector<nnvm::NodeEntry> ThirdGradients(const nnvm::ObjectPtr&,
                                            const std::vector<nnvm::NodeEntry>& head_gradients) {
  for (const nnvm::NodeEntry& head : head_gradients) {
    if (head.node != nullptr) {
      Fail("a third derivative was asked for, expected at most second derivatives");
    }
  }
  return std::vector<nnvm::NodeEntry>(kSecondInputs,
                                      nnvm::NodeEntry{abi::MakeNoGradientNode(), 0, 0});
}

void RegisterSecond() {
  NewOp(kSecondName, ParseAttributes, InferBackwardStorageType)
      .set_num_inputs(kSecondInputs)
      .set_num_outputs(kSecondGradients)
      .set_attr<nnvm::TIsBackward>("TIsBackward", true)
      .set_attr<mxnet::FCompute>("FCompute<cpu>", SecondCompute)
      .set_attr<mxnet::FCompute>("FCompute<gpu>", SecondComputeGpu)
      .set_attr<nnvm::FGradient>("FGradient", ThirdGradients);
}

void RegisterBackward() {
  NewOp(kBackwardName, ParseAttributes, InferBackwardStorageType)
      .set_num_inputs(NumBackwardInputs)
      .set_num_outputs(NumGradients)
      .set_attr<nnvm::TIsBackward>("TIsBackward", true)
      .set_attr<bool>("TIsMKLDNN", true)
      .set_attr<mxnet::FCompute>("FCompute<cpu>", BackwardCompute)
      .set_attr<mxnet::FComputeEx>("FComputeEx<cpu>", BackwardComputeEx)
      .set_attr<mxnet::FCompute>("FCompute<gpu>", BackwardComputeGpu)
      .set_attr<nnvm::FGradient>("FGradient", SecondGradients);
}

void RegisterForward() {
  NewForwardOp(kForwardName, ParseAttributes)
      .set_attr<mxnet::FInferShape>("FInferShape", abi::Callable<ShapeInference>::Wrap(InferShape))
      .set_attr<nnvm::FInferType>("FInferType", abi::Callable<TypeInference>::Wrap(InferType))
      .set_attr<nnvm::FGradient>("FGradient", Gradients)
      .add_argument("addend", "NDArray-or-Symbol", "With with_addend: added, shape of data.")
      .add_argument("act_type", "{None, 'relu'}, optional, default='None'",
                    "Applied last: a ReLU, or nothing.")
      .add_argument("with_addend", "boolean, optional, default=0",
                    "Whether there is an input addend, which is added before act_type.");
}

}  // namespace

nnvm::Op& NewForwardOp(const char* name, Parser* parser) {
  // What the built-in operator does: initial values for moving_mean (0) and moving_var (1).
  const auto initial_values =
      nnvm::Op::GetAttr<nnvm::FSetInputVarAttrOnCompose>("FSetInputVarAttrOnCompose")
          .get(nnvm::Op::Get("BatchNorm"), nullptr);
  return NewOp(name, parser, InferStorageType)
      .describe(
          "Batch normalization with the statistics of the batch or the moving averages, as "
          "is_train,\n"
          "use_global_stats and use_batch_stats say; the gradient is that of the forward that "
          "ran.\n"
          "See mxbn.nd.BatchNorm.")
      .set_num_inputs(NumInputs)
      .set_num_outputs(kOutputs)
      .set_attr<nnvm::FListInputNames>("FListInputNames",
                                       [](const nnvm::NodeAttrs& attrs) {
                                         Names names;
                                         for (uint32_t i = 0; i < NumInputs(attrs); ++i) {
                                           names.push_back(InputName(Param(attrs), i));
                                         }
                                         return names;
                                       })
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
      .set_attr<bool>("TIsMKLDNN", true)
      .set_attr<mxnet::FCompute>("FCompute<cpu>", ForwardCompute)
      .set_attr<mxnet::FComputeEx>("FComputeEx<cpu>", ForwardComputeEx)
      .set_attr<mxnet::FCompute>("FCompute<gpu>", ForwardComputeGpu)
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
      .add_argument("step_global_stats", "boolean, optional, default=0",
                    "Step the moving statistics in training also where use_global_stats uses them.")
      .add_argument("output_mean_var", "boolean, optional, default=0",
                    "Also return the mean and 1/sqrt(var + eps) that were used.")
      .add_argument("axis", "int, optional, default='1'", "The axis of the channels.")
      .add_argument("cudnn_off", "boolean, optional, default=0", "Accepted and ignored.");
}

}  // namespace mxbn

extern "C" {

// Registers the operator, once; null, or what went wrong.
__attribute__((visibility("default"))) const char* mxbn_register() {
  static const std::string error = [] {
    try {
      mxbn::RegisterSecond();
      mxbn::RegisterBackward();
      mxbn::RegisterForward();
      mxbn::RegisterSync();
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

// Whether NDArrays, given as MXNet's handles, are on one context and of known shapes without a size
// of 0. A small call spends more time on asking MXNet for these one by one than on its arithmetic.
__attribute__((visibility("default"))) int mxbn_same_context_and_known_shapes(void* const* handles,
                                                                              int count) {
  const auto* first = static_cast<const mxnet::NDArray*>(handles[0]);
  for (int i = 0; i < count; ++i) {
    const auto* array = static_cast<const mxnet::NDArray*>(handles[i]);
    if (array->is_none() || !(array->ctx() == first->ctx())) return 0;
    const mxnet::TShape& shape = array->shape();
    if (shape.ndim() < 1) return 0;
    for (int j = 0; j < shape.ndim(); ++j) {
      if (shape[j] < 1) return 0;
    }
  }
  return 1;
}

// Lets arrays in oneDNN's layouts be taken as they are (1) or made plain first (0).
__attribute__((visibility("default"))) void mxbn_use_onednn_layouts(int use) {
  mxbn::use_onednn_layouts = use != 0;
}

__attribute__((visibility("default"))) int mxbn_uses_onednn_layouts() {
  return mxbn::use_onednn_layouts;
}

// How many forwards and backwards took arrays in oneDNN's layouts as they were.
__attribute__((visibility("default"))) int64_t mxbn_onednn_layout_passes() {
  return mxbn::onednn_layout_passes;
}

}  // extern "C"
