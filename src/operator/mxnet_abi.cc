#include "mxnet_abi.h"

// Functions of libmxnet.so that its headers do not declare. They build nodes inside libmxnet, so
// that no node is ever laid out here.
namespace mxnet {
namespace op {
std::vector<nnvm::NodeEntry> MakeGradNode(const char* op_name, const nnvm::ObjectPtr& node,
                                          const std::vector<nnvm::NodeEntry>& inputs,
                                          const std::unordered_map<std::string, std::string>& dict);
nnvm::ObjectPtr MakeNode(const char* op_name, const std::string& name,
                         const std::vector<nnvm::NodeEntry>* inputs,
                         const std::unordered_map<std::string, std::string>* dict,
                         const nnvm::ObjectPtr* forward_node);
}  // namespace op
}  // namespace mxnet

namespace mxbn {
namespace abi {

std::vector<nnvm::NodeEntry> MakeGradientNode(const char* op_name, const nnvm::ObjectPtr& node,
                                              const std::vector<nnvm::NodeEntry>& inputs) {
  using Dict = std::unordered_map<std::string, std::string>;
  // A GCC 4.8 map on its way from libmxnet to libmxnet: nothing here looks into it.
  const Dict& dict = reinterpret_cast<const Dict&>(Get(node.get()).attrs.dict);
  return mxnet::op::MakeGradNode(op_name, node, inputs, dict);
}

nnvm::ObjectPtr MakeNoGradientNode() {
  return mxnet::op::MakeNode("_NoGradient", "NoGradient", nullptr, nullptr, nullptr);
}

nnvm::ObjectPtr MakeNode(const char* op_name, const std::string& name,
                         const std::vector<nnvm::NodeEntry>& inputs) {
  return mxnet::op::MakeNode(op_name, name, &inputs, nullptr, nullptr);
}

}  // namespace abi
}  // namespace mxbn

// nnvm::Op::set_attr is inline, so compiled here, and hands libmxnet's Op::UpdateAttrMap a
// std::function<void(dmlc::any*)>. Linked with --wrap, the call comes here instead and goes on with
// a function that libmxnet can call.
using Update = std::function<void(dmlc::any*)>;

extern "C" {
void __real__ZN4nnvm2Op13UpdateAttrMapERKSsSt8functionIFvPN4dmlc3anyEEE(const std::string& key,
                                                                        Update update);
void __wrap__ZN4nnvm2Op13UpdateAttrMapERKSsSt8functionIFvPN4dmlc3anyEEE(const std::string& key,
                                                                        Update update);
}

namespace {
thread_local Update* current_update;
void CallCurrentUpdate(dmlc::any* attribute) { (*current_update)(attribute); }
}  // namespace

void __wrap__ZN4nnvm2Op13UpdateAttrMapERKSsSt8functionIFvPN4dmlc3anyEEE(const std::string& key,
                                                                        Update update) {
  current_update = &update;
  __real__ZN4nnvm2Op13UpdateAttrMapERKSsSt8functionIFvPN4dmlc3anyEEE(
      key, update ? mxbn::abi::Callable<void(dmlc::any*)>::Wrap(&CallCurrentUpdate) : Update());
}
