#include "batch_norm_infer.h"

#include <locale.h>
#include <stdlib.h>

#include <cstdlib>
#include <limits>
#include <sstream>

namespace mxbn {

using mxnet::TShape;

namespace {
constexpr const char* kInputNames[kInputs] = {"data",        "gamma",      "beta",
                                              "moving_mean", "moving_var", "addend"};
}  // namespace

void Fail(const std::string& message) { throw dmlc::Error("mxbn: BatchNorm: " + message); }

// ------------------------------------------------------------------------------------ attributes

namespace {

bool ToBool(const std::string& key, const std::string& value) {
  if (value == "True" || value == "true" || value == "1") return true;
  if (value == "False" || value == "false" || value == "0") return false;
  Fail(key + " is '" + value + "', expected True or False");
}

double ToDouble(const std::string& key, const std::string& value, double max,
                const char* expected) {
  // With a point, whatever the process's locale has.
  static const locale_t c_locale = newlocale(LC_ALL_MASK, "C", nullptr);
  char* end = nullptr;
  const double number = strtod_l(value.c_str(), &end, c_locale);
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

// Whether there is a ReLU.
bool ToActivation(const std::string& key, const std::string& value) {
  if (value == "relu") return true;
  if (value.empty() || value == "None") return false;
  Fail(key + " is '" + value + "', expected relu or None");
}

// MXNet keeps notes of its own among the attributes, such as __lr_mult__.
bool IsNote(const std::string& key) {
  return key.size() > 4 && key.compare(0, 2, "__") == 0 &&
         key.compare(key.size() - 2, 2, "__") == 0;
}

// Takes an attribute of mxbn_SyncBatchNorm; false if it is none.
bool SetSyncAttribute(const std::string& key, const std::string& value, SyncParam* sync) {
  if (key == "key") {
    sync->key = value;
  } else if (key == "num_devices") {
    constexpr int kMost = 1000;
    const double number = ToDouble(key, value, kMost, "a number of devices from 1 to 1000");
    sync->num_devices = static_cast<int>(number);
    if (sync->num_devices != number || number < 1) {
      Fail(key + " is '" + value + "', expected a number of devices from 1 to 1000");
    }
  } else if (key == "timeout") {
    sync->timeout = ToDouble(key, value, 1e9, "a number of seconds from 0 to 1e9");
  } else {
    return false;
  }
  return true;
}

bool IsMirroring(const abi::NodeAttrs& attrs) {
  const char* everywhere = std::getenv("MXNET_BACKWARD_DO_MIRROR");
  if (everywhere != nullptr && std::atoi(everywhere) != 0) return true;
  for (const abi::StringMap::Node* node = attrs.dict.first; node != nullptr; node = node->next) {
    if (node->key == "__force_mirroring__") return ToBool(node->key, node->value);
  }
  return false;
}

void Parse(nnvm::NodeAttrs* node_attrs, bool is_sync) {
  abi::NodeAttrs& attrs = abi::Get(node_attrs);
  NodeParam param;
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
    } else if (key == "step_global_stats") {
      param.step_global_stats = ToBool(key, value);
    } else if (key == "output_mean_var") {
      param.output_mean_var = ToBool(key, value);
    } else if (!is_sync && key == "act_type") {
      param.relu = ToActivation(key, value);
    } else if (!is_sync && key == "with_addend") {
      param.with_addend = ToBool(key, value);
    } else if (key == "cudnn_off") {
      ToBool(key, value);
    } else if (!(is_sync && SetSyncAttribute(key, value, &param.sync)) && !IsNote(key)) {
      Fail("unknown attribute '" + key + "', expected " + (is_sync ? "" : "act_type, ") +
           "axis, cudnn_off, eps, fix_gamma, " + (is_sync ? "key, " : "") + "momentum, " +
           (is_sync ? "num_devices, " : "") + "output_mean_var, step_global_stats, " +
           (is_sync ? "timeout, " : "") + "use_batch_stats" +
           (is_sync ? " or use_global_stats" : ", use_global_stats or with_addend"));
    }
  }
  if (param.use_global_stats && param.use_batch_stats) {
    Fail(
        "use_global_stats and use_batch_stats are both True, expected at most one: the statistics "
        "are either the moving ones or the batch's");
  }
  if (is_sync && param.sync.key.empty()) {
    Fail("key is missing, expected a name of the layer, the same on every device");
  }
  if (IsMirroring(attrs)) param.modes = std::make_shared<ForwardModes>();
  attrs.parsed = param;
}

}  // namespace

void ParseAttributes(nnvm::NodeAttrs* attrs) { Parse(attrs, false); }

void ParseSyncAttributes(nnvm::NodeAttrs* attrs) { Parse(attrs, true); }

const NodeParam& Param(const nnvm::NodeAttrs& attrs) {
  return nnvm::get<NodeParam>(abi::Get(attrs).parsed);
}

void PrepareIfMirror(const nnvm::ObjectPtr& node) {
  abi::NodeAttrs& attrs = abi::Get(node.get()).attrs;
  static const std::string suffix = "_mirror";
  const std::string& name = attrs.name;
  const bool named = name.size() > suffix.size() &&
                     name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
  if (!named || !IsMirroring(attrs)) return;
  NodeParam& param = nnvm::get<NodeParam>(attrs.parsed);
  if (param.modes == nullptr) {
    Fail("node " + name +
         " is to run again in backward, but MXNET_BACKWARD_DO_MIRROR was not set "
         "when its symbol was made, expected to be set before");
  }
  if (param.use_global_stats && param.step_global_stats) {
    // The copy would take the moving statistics as the original left them.
    Fail("node " + name +
         " steps the moving statistics that it uses, so it cannot run again in backward: expected "
         "step_global_stats=False, or MXNET_BACKWARD_DO_MIRROR and force_mirroring unset");
  }
  param.is_mirror = true;
}

// ------------------------------------------------------------------------------ shapes and types

uint32_t NumInputs(const nnvm::NodeAttrs& attrs) {
  const NodeParam& param = Param(attrs);
  return kAddend + (param.with_addend || param.is_sync());
}

std::string InputName(const NodeParam& param, size_t input) {
  return param.is_sync() && input == kBatchInput ? "batch" : kInputNames[input];
}

uint32_t NumBackwardInputs(const nnvm::NodeAttrs& attrs) {
  return kOutputInput + Param(attrs).relu;
}

uint32_t NumGradients(const nnvm::NodeAttrs& attrs) {
  return kAddendGradient + (Param(attrs).relu && Param(attrs).with_addend);
}

void CheckInputs(const nnvm::NodeAttrs& attrs, size_t count) {
  const size_t expected = NumInputs(attrs);
  if (count == expected) return;
  std::string names;
  for (size_t i = 0; i < expected; ++i) {
    names += (i == 0 ? "" : i + 1 == expected ? " and " : ", ") + InputName(Param(attrs), i);
  }
  Fail("got " + std::to_string(count) + " inputs, expected " + std::to_string(expected) + ": " +
       names);
}

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

std::string DeviceName(int dev_mask, int dev_id) {
  const bool is_gpu = dev_mask == mshadow::gpu::kDevMask;
  return (is_gpu ? "gpu(" : "cpu(") + std::to_string(dev_id) + ")";
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

void FailShape(const BatchNormParam& param, int input, const TShape& shape, const TShape& data) {
  const int axis = Axis(param, data);
  std::ostringstream text;
  text << kInputNames[input] << " has shape " << Text(shape) << ", expected (" << data[axis]
       << ",): data " << Text(data) << " has " << data[axis] << " channels on axis " << axis;
  Fail(text.str());
}

namespace {

// Gives two shapes that must be the same what is known of either.
void UniteShapes(TShape* data, TShape* addend) {
  const TShape given = *addend;
  if (!mxnet::ndim_is_known(*data)) *data = given;
  if (!mxnet::ndim_is_known(given)) *addend = *data;
  bool fits = data->ndim() == addend->ndim();
  for (int i = 0; fits && i < data->ndim(); ++i) {
    if (!mxnet::dim_size_is_known(*data, i)) (*data)[i] = (*addend)[i];
    if (!mxnet::dim_size_is_known(*addend, i)) (*addend)[i] = (*data)[i];
    fits = (*data)[i] == (*addend)[i];
  }
  if (!fits) {
    Fail("addend has shape " + Text(given) + ", expected " + Text(*data) + " like data");
  }
}

}  // namespace

bool InferShape(const nnvm::NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  CheckInputs(attrs, in->size());
  const BatchNormParam& param = Param(attrs);
  TShape& data = (*in)[kData];
  if (!mxnet::ndim_is_known(data)) data = (*out)[kOutput];
  if (param.with_addend) UniteShapes(&data, &(*in)[kAddend]);
  if (!mxnet::ndim_is_known(data)) return false;
  (*out)[kOutput] = data;
  if (data.ndim() == 0) Fail("data has shape (), expected at least one dimension");
  const int64_t channels = data[Axis(param, data)];
  if (!mxnet::dim_size_is_known(channels)) return false;
  if (channels == 0) Fail("data has shape " + Text(data) + ", expected at least one channel");
  const TShape per_channel(1, channels);
  for (int i = kGamma; i <= kMovingVar; ++i) {
    TShape& shape = (*in)[i];
    const bool fits =
        !mxnet::ndim_is_known(shape) ||
        (shape.ndim() == 1 && (shape[0] == channels || !mxnet::dim_size_is_known(shape[0])));
    if (!fits) FailShape(param, i, shape, data);
    shape = per_channel;
  }
  (*out)[kMean] = (*out)[kInvStd] = per_channel;
  (*out)[kSaved] = TShape(1, 2 * channels + 1);
  return mxnet::shape_is_known(data);
}

bool InferType(const nnvm::NodeAttrs& attrs, std::vector<int>* in, std::vector<int>* out) {
  CheckInputs(attrs, in->size());
  const bool with_addend = Param(attrs).with_addend;
  int& data = (*in)[kData];
  if (data == -1) data = (*out)[kOutput];
  if (data == -1 && with_addend) data = (*in)[kAddend];
  if (data == -1) return false;
  if (data != mshadow::kFloat16 && data != mshadow::kFloat32 && data != mshadow::kFloat64) {
    Fail(std::string("data has dtype ") + TypeName(data) +
         ", expected float16, float32 or float64");
  }
  const int param = data == mshadow::kFloat64 ? mshadow::kFloat64 : mshadow::kFloat32;
  for (int i = kGamma; i <= kMovingVar; ++i) {
    int& type = (*in)[i];
    if (type != -1 && type != param) {
      Fail(std::string(kInputNames[i]) + " has dtype " + TypeName(type) + ", expected " +
           TypeName(param) + ": data has dtype " + TypeName(data));
    }
    type = param;
  }
  if (with_addend) {
    int& type = (*in)[kAddend];
    if (type == -1) type = data;
    if (type != data) {
      Fail(std::string("addend has dtype ") + TypeName(type) + ", expected " + TypeName(data) +
           " like data");
    }
  }
  (*out)[kOutput] = data;
  (*out)[kMean] = (*out)[kInvStd] = param;
  (*out)[kSaved] = mshadow::kFloat64;
  return true;
}

namespace {

// Of the inputs of a backward, only the head gradient may be sparse: the others were a forward's.
bool InferStorage(const nnvm::NodeAttrs& attrs, bool is_backward, const int dev_mask,
                  mxnet::DispatchMode* mode, std::vector<int>* in, std::vector<int>* out) {
  for (size_t i = 0; i < in->size(); ++i) {
    int& type = (*in)[i];
    if (type == mxnet::kUndefinedStorage) type = mxnet::kDefaultStorage;
    if (type != mxnet::kDefaultStorage) {
      const char* name = type == mxnet::kCSRStorage ? "csr" : "row_sparse";
      Fail((is_backward ? "the head gradient" : InputName(Param(attrs), i)) + " has storage type " +
           name + ", expected default: sparse arrays are not supported");
    }
  }
  for (int& type : *out) type = mxnet::kDefaultStorage;
  // FComputeEx takes oneDNN's layouts as they are.
  *mode = dev_mask == mshadow::cpu::kDevMask ? mxnet::DispatchMode::kFComputeEx
                                             : mxnet::DispatchMode::kFCompute;
  return true;
}

}  // namespace

bool InferStorageType(const nnvm::NodeAttrs& attrs, const int dev_mask, mxnet::DispatchMode* mode,
                      std::vector<int>* in, std::vector<int>* out) {
  return InferStorage(attrs, false, dev_mask, mode, in, out);
}

bool InferBackwardStorageType(const nnvm::NodeAttrs& attrs, const int dev_mask,
                              mxnet::DispatchMode* mode, std::vector<int>* in,
                              std::vector<int>* out) {
  return InferStorage(attrs, true, dev_mask, mode, in, out);
}

}  // namespace mxbn
