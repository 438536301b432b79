#include "batch_norm_onednn.h"

#include "onednn_layout.h"

namespace mxbn {

std::atomic<bool> use_onednn_layouts{true};
std::atomic<int64_t> onednn_layout_passes{0};

namespace {

// An array as it lies in memory.
mxnet::TBlob Raw(const mxnet::NDArray& array) {
  mxnet::TBlob blob;
  blob.dptr_ = onednn::Memory(array);
  blob.shape_ = array.shape();
  blob.type_flag_ = array.dtype();
  return blob;
}

// An array in the plain layout; none where there is none.
mxnet::TBlob Plain(const mxnet::NDArray& array) {
  return array.is_none() ? mxnet::TBlob() : array.data();
}

// Arrays in the plain layout, and the copies that this took.
class PlainArrays {
 public:
  explicit PlainArrays(const Arrays& arrays) {
    copies_.reserve(arrays.size());
    for (const mxnet::NDArray& array : arrays) {
      if (!array.IsDefaultData()) copies_.push_back(array.Reorder2Default());
      blobs_.push_back((array.IsDefaultData() ? array : copies_.back()).data());
    }
  }
  const Blobs& blobs() const { return blobs_; }

 private:
  Arrays copies_;
  Blobs blobs_;
};

// Outputs in the plain layout, to be written to or added to.
Blobs PlainOutputs(const Arrays& arrays, const Requests& request) {
  Blobs blobs;
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (request[i] != mxnet::kNullOp) onednn::MakePlain(arrays[i]);
    const bool as_it_is =
        request[i] == mxnet::kNullOp && !arrays[i].is_none() && !arrays[i].IsDefaultData();
    blobs.push_back(as_it_is ? Raw(arrays[i]) : Plain(arrays[i]));
  }
  return blobs;
}

// Whether `out`, by its request, can take values in the layout of `like`.
bool Takes(const mxnet::NDArray& out, mxnet::OpReqType request, const mxnet::NDArray& like) {
  switch (request) {
    case mxnet::kNullOp: return true;
    case mxnet::kAddTo: return onednn::SameLayout(out, like);
    default: return onednn::LayOutLike(like, out);
  }
}

}  // namespace

void ForwardComputeEx(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                      const Arrays& in, const Requests& request, const Arrays& out) {
  const NodeParam& param = Param(attrs);
  const mxnet::NDArray& data = in[kData];
  View view;
  if (use_onednn_layouts && Axis(param, data.shape()) == 1 && onednn::Look(data, &view) &&
      (!param.with_addend || onednn::SameLayout(data, in[kAddend])) &&
      Takes(out[kOutput], request[kOutput], data)) {
    ++onednn_layout_passes;
    Blobs in_blobs = {Raw(data)}, out_blobs = {Raw(out[kOutput])};
    for (size_t i = kGamma; i < in.size(); ++i) {
      const bool is_addend = param.with_addend && i == kAddend;
      in_blobs.push_back(is_addend ? Raw(in[i]) : in[i].data());
    }
    for (int i = kMean; i < kOutputs; ++i) out_blobs.push_back(out[i].data());
    RunForward(param, context.is_train, view, in_blobs, request, out_blobs);
    return;
  }
  const PlainArrays plain(in);
  ForwardCompute(attrs, context, plain.blobs(), request, PlainOutputs(out, request));
}

void StatisticsComputeEx(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                         const Arrays& in, const Requests& request, const Arrays& out) {
  const NodeParam& param = Param(attrs);
  const mxnet::NDArray& data = in[kData];
  const Blobs out_blobs = {out[0].data()};
  View view;
  if (use_onednn_layouts && Axis(param, data.shape()) == 1 && onednn::Look(data, &view)) {
    ++onednn_layout_passes;
    RunStatistics(param, context.is_train, view, {Raw(data)}, out_blobs);
    return;
  }
  const PlainArrays plain(in);
  StatisticsCompute(attrs, context, plain.blobs(), request, out_blobs);
}

void BackwardComputeEx(const nnvm::NodeAttrs& attrs, const mxnet::OpContext& context,
                       const Arrays& in, const Requests& request, const Arrays& out) {
  const NodeParam& param = Param(attrs);
  const mxnet::NDArray &data = in[kDataInput], &head = in[kHeadGradient];
  const bool with_addend = !param.is_sync() && out.size() > kAddendGradient;
  View view;
  if (use_onednn_layouts && Axis(param, data.shape()) == 1 && onednn::SameLayout(data, head) &&
      onednn::Look(data, &view) && head.shape() == data.shape() &&
      (!param.relu || onednn::SameLayout(data, in[kOutputInput])) &&
      Takes(out[kDataGradient], request[kDataGradient], data) &&
      (!with_addend || Takes(out[kAddendGradient], request[kAddendGradient], data))) {
    ++onednn_layout_passes;
    Blobs in_blobs = {Raw(head), in[kSavedInput].data(), Raw(data)}, out_blobs;
    for (size_t i = kGammaInput; i < in.size(); ++i) {
      const bool is_output = param.relu && i == kOutputInput;
      in_blobs.push_back(is_output ? Raw(in[i]) : in[i].data());
    }
    out_blobs.push_back(out[kDataGradient].is_none() ? mxnet::TBlob() : Raw(out[kDataGradient]));
    for (size_t i = kGammaGradient; i < out.size(); ++i) {
      const bool is_addend = with_addend && i == kAddendGradient;
      out_blobs.push_back(is_addend ? Raw(out[i]) : Plain(out[i]));
    }
    RunBackward(param, view, in_blobs, request, out_blobs);
    return;
  }
  const PlainArrays plain(in);
  BackwardCompute(attrs, context, plain.blobs(), request, PlainOutputs(out, request));
}

}  // namespace mxbn
