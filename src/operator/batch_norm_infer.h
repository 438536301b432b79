// What the operator's files that see MXNet share: its parts by name, its attributes, and the
// checks, which throw dmlc::Error with a message that names the operator, the argument, what came
// and what was expected.
#ifndef MXBN_OPERATOR_BATCH_NORM_INFER_H_
#define MXBN_OPERATOR_BATCH_NORM_INFER_H_

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "batch_norm.h"
#include "mxnet_abi.h"

namespace mxbn {

enum Input { kData, kGamma, kBeta, kMovingMean, kMovingVar, kAddend, kInputs };
enum Output { kOutput, kMean, kInvStd, kSaved, kOutputs };
enum BackwardInput { kHeadGradient, kSavedInput, kDataInput, kGammaInput, kOutputInput };
enum Gradient { kDataGradient, kGammaGradient, kBetaGradient, kAddendGradient };
// The second backward takes head gradients for the first three, then what the backward was given,
// without the output.
constexpr int kSecondInputs = kAddendGradient + kOutputInput;
enum SecondGradient { kForHeadGradient, kForData, kForGamma, kSecondGradients };
// Where the batch is spread over devices (see sync_batch_norm.cc), nothing is fused, and in the
// places of what would be there are:
constexpr size_t kBatchInput = kAddend;           // a forward's: the summary of all of it
constexpr size_t kBatchSumsInput = kOutputInput;  // a backward's: the sums of all of it
constexpr size_t kPartSums = kAddendGradient;     // a gradient's output: the sums of this part

// The mode of the last forward of a node, by the array of its moving mean, of which each executor
// has its own.
class ForwardModes {
 public:
  void Put(const void* moving_mean, bool is_train) {
    std::lock_guard<std::mutex> lock(mutex_);
    modes_[moving_mean] = is_train;
  }
  bool Get(const void* moving_mean) {
    std::lock_guard<std::mutex> lock(mutex_);
    return modes_[moving_mean];
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, bool> modes_;
};

// What the devices that share a layer agree on; one of them alone, without a key, does not ask.
struct SyncParam {
  std::string key;
  int num_devices = 1;
  double timeout = 300;  // in seconds
};

// The attributes of a node, parsed.
struct NodeParam : BatchNormParam {
  SyncParam sync;
  bool is_sync() const { return !sync.key.empty(); }

  // MXNet may save memory by running forwards again within backward (MXNET_BACKWARD_DO_MIRROR, the
  // attribute force_mirroring), in backward's mode, by a copy of the node. The copy must not step,
  // and take the mode of the original, with which it shares `modes`; null where nothing is
  // mirrored.
  std::shared_ptr<ForwardModes> modes;
  bool is_mirror = false;
};

[[noreturn]] void Fail(const std::string& message);
[[noreturn]] void FailShape(const BatchNormParam& param, int input, const mxnet::TShape& shape,
                            const mxnet::TShape& data);
const char* TypeName(int type);
std::string DeviceName(int dev_mask, int dev_id);  // cpu(0)
std::string Text(const mxnet::TShape& shape);

// How many of these a node has. Its gradient looks at the output where a ReLU gave it, and computes
// that of the addend there; without a ReLU, that is the head gradient itself.
uint32_t NumInputs(const nnvm::NodeAttrs& attrs);
std::string InputName(const NodeParam& param, size_t input);
uint32_t NumBackwardInputs(const nnvm::NodeAttrs& attrs);
uint32_t NumGradients(const nnvm::NodeAttrs& attrs);

// Refuses another number of inputs, which a damaged symbol file may hold.
void CheckInputs(const nnvm::NodeAttrs& attrs, size_t count);

// The axis of the channels, counted from the front.
int Axis(const BatchNormParam& param, const mxnet::TShape& data);

void ParseAttributes(nnvm::NodeAttrs* attrs);
void ParseSyncAttributes(nnvm::NodeAttrs* attrs);
const NodeParam& Param(const nnvm::NodeAttrs& attrs);

// To be called on the node that a gradient is made for.
void PrepareIfMirror(const nnvm::ObjectPtr& node);

bool InferShape(const nnvm::NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out);
bool InferType(const nnvm::NodeAttrs& attrs, std::vector<int>* in, std::vector<int>* out);
bool InferStorageType(const nnvm::NodeAttrs& attrs, const int dev_mask, mxnet::DispatchMode* mode,
                      std::vector<int>* in, std::vector<int>* out);
bool InferBackwardStorageType(const nnvm::NodeAttrs& attrs, const int dev_mask,
                              mxnet::DispatchMode* mode, std::vector<int>* in,
                              std::vector<int>* out);

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_INFER_H_
