// BatchNorm of a batch that is spread over devices, as MXNet sees it: three nodes forward,
//   _mxbn_sync_statistics  data -> the summary of this part
//   _mxbn_sync_exchange    -> that of the whole batch
//   mxbn_SyncBatchNorm     normalizes with it, and steps
// and, made by the last one's gradient, three backward:
//   _backward_mxbn_sync_reduce      the gradients of gamma and beta of this part, and its sums
//   _backward_mxbn_sync_exchange    -> those of the whole batch
//   _backward_mxbn_SyncBatchNorm    the gradient of data
// An exchange is asynchronous, and touches small arrays alone: while it waits, no worker of MXNet's
// engine does, nor is any other array in use.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "batch_norm_onednn.h"
#include "batch_norm_register.h"
#include "cuda_driver.h"
#include "sync_exchange.h"

namespace mxbn {
namespace {

constexpr char kExchangeName[] = "_mxbn_sync_exchange";
constexpr char kReduceName[] = "_backward_mxbn_sync_reduce";
constexpr char kBackwardExchangeName[] = "_backward_mxbn_sync_exchange";
constexpr char kBackwardName[] = "_backward_mxbn_SyncBatchNorm";
enum ReduceOutput { kPartGammaGradient, kPartBetaGradient, kReducedSums, kReduceOutputs };

// -------------------------------------------------------------------------------------- gradients

std::vector<nnvm::NodeEntry> Gradients(const nnvm::ObjectPtr& node,
                                       const std::vector<nnvm::NodeEntry>& head_gradients) {
  PrepareIfMirror(node);
  if (Param(node->attrs).is_mirror) {
    Fail(
        "a batch that is spread over devices cannot run again in backward, expected "
        "MXNET_BACKWARD_DO_MIRROR and force_mirroring unset");
  }
  const std::vector<nnvm::NodeEntry>& inputs = abi::Get(node.get()).inputs;
  const nnvm::NodeEntry none{abi::MakeNoGradientNode(), 0, 0};
  std::vector<nnvm::NodeEntry> reduce_inputs = {
      head_gradients[kOutput], nnvm::NodeEntry{node, kSaved, 0}, inputs[kData], inputs[kGamma]};
  const auto reduced = abi::MakeGradientNode(kReduceName, node, reduce_inputs);
  nnvm::NodeEntry data = none;
  // MXNet also asks without inputs, to learn which of them matter. And where data was not recorded,
  // the forward's exchange was not.
  const nnvm::ObjectPtr& batch_node = inputs.at(kBatchInput).node;
  if (batch_node == nullptr || batch_node->op() == nnvm::Op::Get(kExchangeName)) {
    const nnvm::ObjectPtr& exchange = batch_node != nullptr ? batch_node : node;
    reduce_inputs.push_back(
        abi::MakeGradientNode(kBackwardExchangeName, exchange, {reduced[kReducedSums]})[0]);
    data = abi::MakeGradientNode(kBackwardName, node, reduce_inputs)[0];
  }
  return {data, reduced[kPartGammaGradient], reduced[kPartBetaGradient], none, none, none};
}

// What the statistics contribute to the gradient is part of the last node's.
std::vector<nnvm::NodeEntry> NoGradient(const nnvm::ObjectPtr& node,
                                        const std::vector<nnvm::NodeEntry>&) {
  // zeros_like: MXNet leaves it out where it adds up gradients.
  const abi::Node& forward = abi::Get(node.get());
  const std::string name = forward.attrs.name + "_backward";
  return {{abi::MakeNode("zeros_like", name, {forward.inputs.at(0)}), 0, 0}};
}

// Hands the two halves of a backward on to the whole one, of which the other half is not wanted.
template <typename Array>
using Compute = void(const nnvm::NodeAttrs&, const mxnet::OpContext&, const std::vector<Array>&,
                     const Requests&, const std::vector<Array>&);

template <typename Array, Compute<Array> backward>
void Reduce(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
            const std::vector<Array>& in, const Requests& request, const std::vector<Array>& out) {
  backward(attrs, context, in, {mxnet::kNullOp, request[0], request[1], request[2]},
           {Array(), out[0], out[1], out[2]});
}

template <typename Array, Compute<Array> backward>
void DataGradient(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                  const std::vector<Array>& in, const Requests& request,
                  const std::vector<Array>& out) {
  backward(attrs, context, in, {request[0], mxnet::kNullOp, mxnet::kNullOp},
           {out[0], Array(), Array()});
}

// --------------------------------------------------------------------------------- shapes, types

int64_t Channels(const nnvm::NodeAttrs& attrs, const mxnet::TShape& data) {
  return data[Axis(Param(attrs), data)];
}

bool InferStatisticsShape(const nnvm::NodeAttrs& attrs, mxnet::ShapeVector* in,
                          mxnet::ShapeVector* out) {
  const mxnet::TShape& data = (*in)[kData];
  if (!mxnet::ndim_is_known(data)) return false;
  if (data.ndim() == 0) Fail("data has shape (), expected at least one dimension");
  const int64_t channels = Channels(attrs, data);
  if (!mxnet::dim_size_is_known(channels)) return false;
  const mxnet::TShape summary(1, SummarySize(channels));
  (*out)[0] = summary;
  return mxnet::shape_is_known(data);
}

bool InferExchangeShape(const nnvm::NodeAttrs&, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  (*out)[0] = (*in)[0];
  return mxnet::shape_is_known((*in)[0]);
}

bool InferSyncShape(const nnvm::NodeAttrs& attrs, mxnet::ShapeVector* in, mxnet::ShapeVector* out) {
  const bool known = InferShape(attrs, in, out);
  mxnet::TShape& batch = (*in)[kBatchInput];
  const mxnet::TShape& saved = (*out)[kSaved];
  if (!mxnet::shape_is_known(saved)) return false;
  const mxnet::TShape expected(1, saved[0] + 1);
  if (mxnet::shape_is_known(batch) && batch != expected) {
    Fail("batch has shape " + Text(batch) + ", expected " + Text(expected));
  }
  batch = expected;
  return known;
}

bool InferReduceShape(const nnvm::NodeAttrs& attrs, mxnet::ShapeVector* in,
                      mxnet::ShapeVector* out) {
  const mxnet::TShape& data = (*in)[kDataInput];
  if (!mxnet::shape_is_known(data)) return false;
  if (!mxnet::ndim_is_known((*in)[kHeadGradient])) (*in)[kHeadGradient] = data;
  const int64_t channels = Channels(attrs, data);
  const mxnet::TShape per_channel(1, channels), summary(1, SummarySize(channels));
  (*out)[kPartGammaGradient] = (*out)[kPartBetaGradient] = per_channel;
  (*out)[kReducedSums] = summary;
  return true;
}

bool InferDataGradientShape(const nnvm::NodeAttrs&, mxnet::ShapeVector* in,
                            mxnet::ShapeVector* out) {
  (*out)[0] = (*in)[kDataInput];
  return mxnet::shape_is_known((*out)[0]);
}

bool InferSummaryType(const nnvm::NodeAttrs&, std::vector<int>*, std::vector<int>* out) {
  (*out)[0] = mshadow::kFloat64;
  return true;
}

bool InferSyncType(const nnvm::NodeAttrs& attrs, std::vector<int>* in, std::vector<int>* out) {
  const bool known = InferType(attrs, in, out);
  (*in)[kBatchInput] = mshadow::kFloat64;
  return known;
}

bool InferReduceType(const nnvm::NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  if ((*in)[kHeadGradient] == -1) (*in)[kHeadGradient] = (*in)[kDataInput];
  (*out)[kPartGammaGradient] = (*out)[kPartBetaGradient] = (*in)[kGammaInput];
  (*out)[kReducedSums] = mshadow::kFloat64;
  return (*in)[kGammaInput] != -1;
}

bool InferDataGradientType(const nnvm::NodeAttrs&, std::vector<int>* in, std::vector<int>* out) {
  (*out)[0] = (*in)[kDataInput];
  return (*out)[0] != -1;
}

// --------------------------------------------------------------------------------- the exchange

// Where a device sits at a layer's meetings. All exchanges of one device share it, and MXNet's
// engine runs those that share a state one after the other, in the order of the program: the n-th
// call of a device meets the n-th call of the others.
struct Seat {
  SyncParam layer;
  mxnet::Context device;
};

std::string NameOf(const mxnet::Context& device) {
  return DeviceName(device.dev_mask(), device.dev_id);
}

// Kept for as long as the process lives: a few bytes for each device of each layer. Never
// destroyed, so that libmxnet never calls what it could not (see mxnet_abi.h).
mxnet::OpStatePtr TakeSeat(const nnvm::NodeAttrs& attrs, mxnet::Context device,
                           const mxnet::ShapeVector&, const std::vector<int>&) {
  using Key = std::tuple<std::string, int, double, std::string>;
  static std::mutex mutex;
  static auto& seats = *new std::map<Key, mxnet::OpStatePtr>;
  const SyncParam& layer = Param(attrs).sync;
  std::lock_guard<std::mutex> lock(mutex);
  mxnet::OpStatePtr& seat = seats[Key(layer.key, layer.num_devices, layer.timeout, NameOf(device))];
  if (!seat) seat = mxnet::OpStatePtr::Create<Seat>(Seat{layer, device});
  return seat;
}

// A summary between its array on a device and this thread.
sync::Summary Read(const mxnet::Context& device, const mxnet::TBlob& array) {
  sync::Summary summary(array.shape_.Size());
  const size_t bytes = summary.size() * sizeof(double);
  if (device.dev_mask() == mshadow::gpu::kDevMask) {
    cuda::Device::Get(device.dev_id).CopyToHost(summary.data(), array.dptr_, bytes);
  } else {
    std::memcpy(summary.data(), array.dptr_, bytes);
  }
  return summary;
}

void Write(const mxnet::Context& device, const sync::Summary& summary, void* array) {
  const size_t bytes = summary.size() * sizeof(double);
  if (device.dev_mask() == mshadow::gpu::kDevMask) {
    cuda::Device::Get(device.dev_id).CopyToDevice(array, summary.data(), bytes);
  } else {
    std::memcpy(array, summary.data(), bytes);
  }
}

bool IsNaiveEngine() {
  const char* engine = std::getenv("MXNET_ENGINE_TYPE");
  return engine != nullptr && std::strcmp(engine, "NaiveEngine") == 0;
}

// MXNet runs operators that are called one after the other in one go, or bulk, which waits for all
// that any of them needs. What comes before an exchange must not wait for another layer's: it
// begins a bulk of its own. MXNet asks for an operator's type when it is called.
mxnet::ExecType BeginBulk(const nnvm::NodeAttrs&) {
  mxnet::Engine* const engine = mxnet::Engine::Get();
  engine->set_bulk_size(engine->set_bulk_size(0));  // of this thread
  return mxnet::ExecType::kSync;
}

void Exchange(sync::Direction direction, const Seat& seat, const mxnet::OpContext& context,
              const Blobs& in, const Blobs& out) {
  const mxnet::Context device = seat.device;
  void* const array = out[0].dptr_;
  sync::Summary part = Read(device, in[0]);
  const bool use_batch = part.back() != 0;
  const bool alone = seat.layer.num_devices == 1 && !sync::IsConnected(seat.layer.key);
  if (!use_batch || alone) {
    Write(device, part, array);
    return context.async_on_complete();
  }
  if (IsNaiveEngine()) {
    Fail("layer '" + seat.layer.key +
         "' waits for other devices, which MXNet's NaiveEngine would "
         "not start before: expected another MXNET_ENGINE_TYPE");
  }
  const mxnet::Engine::CallbackOnComplete complete = context.async_on_complete;
  sync::Arrive(seat.layer, direction, NameOf(device), std::move(part),
               [=](const sync::Summary* batch, std::string error) {
                 try {
                   if (batch != nullptr) Write(device, *batch, array);
                 } catch (const std::exception& e) {
                   error = e.what();
                 }
                 if (error.empty()) return complete();
                 const dmlc::Error failure(error);
                 complete(&failure);
               });
}

template <sync::Direction direction>
void ExchangeCompute(const mxnet::OpStatePtr& state, const mxnet::OpContext& context,
                     const Blobs& in, const Requests&, const Blobs& out) {
  const Seat& seat = state.get_state<Seat>();
  try {
    Exchange(direction, seat, context, in, out);
  } catch (const std::runtime_error& error) {  // a dmlc::Error too, whose text is a whole one
    if (dynamic_cast<const dmlc::Error*>(&error) != nullptr) throw;
    Fail("on " + NameOf(seat.device) + ": " + error.what());  // MXNet survives a dmlc::Error only
  }
}

nnvm::Op& NewExchange(const char* name, mxnet::FStatefulCompute exchange) {
  return dmlc::Registry<nnvm::Op>::Get()
      ->__REGISTER__(name)
      .set_attr_parser(abi::Callable<Parser>::Wrap(ParseSyncAttributes))
      .set_num_inputs(1)
      .set_num_outputs(1)
      .set_attr<mxnet::FInferShape>("FInferShape",
                                    abi::Callable<ShapeInference>::Wrap(InferExchangeShape))
      .set_attr<nnvm::FInferType>("FInferType",
                                  abi::Callable<TypeInference>::Wrap(InferSummaryType))
      .set_attr<mxnet::FInferStorageType>("FInferStorageType",
                                          abi::Callable<StorageInference>::Wrap(InferStorageType))
      .set_attr<mxnet::FExecType>("FExecType",
                                  [](const nnvm::NodeAttrs&) { return mxnet::ExecType::kAsync; })
      .set_attr<mxnet::FStatefulCompute>("FStatefulCompute<cpu>", exchange)
      .set_attr<mxnet::FStatefulCompute>("FStatefulCompute<gpu>", exchange);
}

// Not marked as TIsBackward: MXNet would take the shapes from the forward's gradient, of which it
// expects that it is one node.
nnvm::Op& NewBackward(const char* name, uint32_t inputs, uint32_t outputs, ShapeInference* shape,
                      TypeInference* type) {
  return NewOp(name, ParseSyncAttributes, InferBackwardStorageType)
      .set_num_inputs(inputs)
      .set_num_outputs(outputs)
      .set_attr<bool>("TIsMKLDNN", true)
      .set_attr<mxnet::FInferShape>("FInferShape", abi::Callable<ShapeInference>::Wrap(shape))
      .set_attr<nnvm::FInferType>("FInferType", abi::Callable<TypeInference>::Wrap(type));
}

}  // namespace

void RegisterSync() {
  using NewState = mxnet::OpStatePtr(const nnvm::NodeAttrs&, mxnet::Context,
                                     const mxnet::ShapeVector&, const std::vector<int>&);
  NewBackward(kReduceName, kBatchSumsInput, kReduceOutputs, InferReduceShape, InferReduceType)
      .set_attr<mxnet::FExecType>("FExecType", BeginBulk)
      .set_attr<mxnet::FCompute>("FCompute<cpu>", Reduce<mxnet::TBlob, BackwardCompute>)
      .set_attr<mxnet::FComputeEx>("FComputeEx<cpu>", Reduce<mxnet::NDArray, BackwardComputeEx>)
      .set_attr<mxnet::FCompute>("FCompute<gpu>", Reduce<mxnet::TBlob, BackwardComputeGpu>);
  NewExchange(kBackwardExchangeName, ExchangeCompute<sync::kBackward>)
      .set_attr<bool>("TIsLayerOpBackward", true);  // with the state of the forward's
  NewBackward(kBackwardName, kBatchSumsInput + 1, 1, InferDataGradientShape, InferDataGradientType)
      .set_attr<mxnet::FCompute>("FCompute<cpu>", DataGradient<mxnet::TBlob, BackwardCompute>)
      .set_attr<mxnet::FComputeEx>("FComputeEx<cpu>",
                                   DataGradient<mxnet::NDArray, BackwardComputeEx>)
      .set_attr<mxnet::FCompute>("FCompute<gpu>", DataGradient<mxnet::TBlob, BackwardComputeGpu>);
  NewOp("_mxbn_sync_statistics", ParseSyncAttributes, InferStorageType)
      .set_num_inputs(1)
      .set_num_outputs(1)
      .set_attr<mxnet::FExecType>("FExecType", BeginBulk)
      .set_attr<bool>("TIsMKLDNN", true)
      .set_attr<mxnet::FInferShape>("FInferShape",
                                    abi::Callable<ShapeInference>::Wrap(InferStatisticsShape))
      .set_attr<nnvm::FInferType>("FInferType",
                                  abi::Callable<TypeInference>::Wrap(InferSummaryType))
      .set_attr<mxnet::FCompute>("FCompute<cpu>", StatisticsCompute)
      .set_attr<mxnet::FComputeEx>("FComputeEx<cpu>", StatisticsComputeEx)
      .set_attr<mxnet::FCompute>("FCompute<gpu>", StatisticsComputeGpu)
      .set_attr<nnvm::FGradient>("FGradient", NoGradient)
      .add_argument("data", "NDArray-or-Symbol", "A part of the batch.");
  NewExchange(kExchangeName, ExchangeCompute<sync::kForward>)
      .set_attr<mxnet::FCreateOpState>("FCreateOpState", abi::Callable<NewState>::Wrap(TakeSeat))
      .set_attr<nnvm::FGradient>("FGradient", NoGradient)
      .add_argument("data", "NDArray-or-Symbol", "The summary of a part of the batch.");
  NewForwardOp("mxbn_SyncBatchNorm", ParseSyncAttributes)
      .set_attr<mxnet::FInferShape>("FInferShape",
                                    abi::Callable<ShapeInference>::Wrap(InferSyncShape))
      .set_attr<nnvm::FInferType>("FInferType", abi::Callable<TypeInference>::Wrap(InferSyncType))
      .set_attr<nnvm::FGradient>("FGradient", Gradients)
      .add_argument("batch", "NDArray-or-Symbol", "The summary of the whole batch.")
      .add_argument("key", "string", "A name of the layer, the same on every device.")
      .add_argument("num_devices", "int, optional, default='1'", "Devices that share the batch.")
      .add_argument("timeout", "double, optional, default=300", "Seconds to wait for the others.");
}

}  // namespace mxbn
