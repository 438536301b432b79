// The bridge to the released libmxnet.so of MXNet 1.9.1. It was built with GCC 4.8 and the old
// std::string (compile with _GLIBCXX_USE_CXX11_ABI=0); a newer compiler lays out everything in
// MXNet's headers as it did, except for two things, which this pair of files mends:
//   - std::unordered_map has 48 bytes there and 56 here, which moves what follows it in
//     nnvm::NodeAttrs and nnvm::Node: these are mirrored below, to read them;
//   - a std::function is called with its arguments by value there and by reference here. Signatures
//     of references only (FCompute, FGradient, ...) are called alike; those with pointers or
//     numbers by value go through Callable.
// tests/test_abi.py checks the layouts against the headers in MXNet's wheel.
#ifndef MXBN_OPERATOR_MXNET_ABI_H_
#define MXBN_OPERATOR_MXNET_ABI_H_

#include <dmlc/any.h>
#include <mxnet/op_attr_types.h>
#include <nnvm/node.h>
#include <nnvm/op.h>
#include <nnvm/op_attr_types.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace mxbn {
namespace abi {

// std::unordered_map<std::string, std::string> of GCC 4.8, to read.
struct StringMap {
  struct Node {
    Node* next;
    std::string key;
    std::string value;
    size_t hash;
  };
  void* buckets;
  size_t bucket_count;
  Node* first;
  size_t size;
  float max_load_factor;
  size_t next_resize;
};

struct NodeAttrs {
  const nnvm::Op* op;
  std::string name;
  StringMap dict;
  dmlc::any parsed;
  std::vector<std::shared_ptr<nnvm::Symbol>> subgraphs;
};

struct Node {
  NodeAttrs attrs;
  std::vector<nnvm::NodeEntry> inputs;
  std::vector<nnvm::ObjectPtr> control_deps;
  dmlc::any info;
};

static_assert(sizeof(std::string) == sizeof(char*), "needs _GLIBCXX_USE_CXX11_ABI=0");
static_assert(sizeof(StringMap) == 48 && sizeof(NodeAttrs) == 120 && sizeof(Node) == 200,
              "not the layout of GCC 4.8");
static_assert(sizeof(nnvm::NodeAttrs) == sizeof(NodeAttrs) + sizeof(void*) &&
                  sizeof(nnvm::Node) == sizeof(Node) + sizeof(void*),
              "the mirrors differ from MXNet's headers by more than the map");

inline const NodeAttrs& Get(const nnvm::NodeAttrs& attrs) {
  return reinterpret_cast<const NodeAttrs&>(attrs);
}
inline NodeAttrs& Get(nnvm::NodeAttrs* attrs) { return *reinterpret_cast<NodeAttrs*>(attrs); }
inline Node& Get(nnvm::Node* node) { return *reinterpret_cast<Node*>(node); }

// A std::function that libmxnet can call, although its signature takes values.
template <typename Signature>
struct Callable;
template <typename R, typename... Args>
struct Callable<R(Args...)> {
  using Function = R (*)(Args...);

  static std::function<R(Args...)> Wrap(Function function) {
    // libstdc++: 16 bytes of storage (here: the pointer), the manager, the invoker.
    std::function<R(Args...)> wrapped(function);
    R (*invoker)(const std::_Any_data&, Args...) = &Call;
    static_assert(sizeof(wrapped) == 32, "not the std::function of libstdc++");
    std::memcpy(reinterpret_cast<char*>(&wrapped) + 24, &invoker, sizeof invoker);
    return wrapped;
  }

 private:
  static R Call(const std::_Any_data& data, Args... args) {
    return data._M_access<Function>()(args...);
  }
};

// The gradient node of `node` (MXNet's MakeGradNode), with the attributes of `node`.
std::vector<nnvm::NodeEntry> MakeGradientNode(const char* op_name, const nnvm::ObjectPtr& node,
                                              const std::vector<nnvm::NodeEntry>& inputs);
// A node that says: no gradient flows here.
nnvm::ObjectPtr MakeNoGradientNode();
// A node of an operator of MXNet's without attributes.
nnvm::ObjectPtr MakeNode(const char* op_name, const std::string& name,
                         const std::vector<nnvm::NodeEntry>& inputs);

}  // namespace abi
}  // namespace mxbn

#endif  // MXBN_OPERATOR_MXNET_ABI_H_
