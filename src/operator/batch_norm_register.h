// What the registrations of the operators share.
#ifndef MXBN_OPERATOR_BATCH_NORM_REGISTER_H_
#define MXBN_OPERATOR_BATCH_NORM_REGISTER_H_

#include <cstdint>
#include <vector>

#include "mxnet_abi.h"

namespace mxbn {

using Parser = void(nnvm::NodeAttrs*);
using ShapeInference = bool(const nnvm::NodeAttrs&, mxnet::ShapeVector*, mxnet::ShapeVector*);
using TypeInference = bool(const nnvm::NodeAttrs&, std::vector<int>*, std::vector<int>*);
using StorageInference = bool(const nnvm::NodeAttrs&, const int, mxnet::DispatchMode*,
                              std::vector<int>*, std::vector<int>*);

// An operator of that name; and one that normalizes.
nnvm::Op& NewOp(const char* name, Parser* parser, StorageInference* infer_storage);
nnvm::Op& NewForwardOp(const char* name, Parser* parser);

// The operators of a batch that is spread over devices.
void RegisterSync();

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_REGISTER_H_
