// Compiled without access control: the layout of an NDArray is a private member. mxbn's self-test
// looks at the result when the package is imported.
#include "onednn_layout.h"

#include <cstring>
#include <memory>

namespace mxnet {
// In none of the wheel's headers: what a thread hands to oneDNN, and what it keeps alive meanwhile.
class MKLDNNStream {
 public:
  static MKLDNNStream* Get();
  void Submit(bool cleanup);
};
}  // namespace mxnet

namespace mxbn {
namespace onednn {
namespace {

// mxnet::MKLDNNMemory, which the headers only declare, to read.
struct MemoryMirror {
  std::shared_ptr<mkldnn::memory> memory;
  mkldnn::memory::desc description;
  size_t size;
};

// Null for an array in MXNet's plain layout, and for a part of another array.
const dnnl_memory_desc_t* Description(const mxnet::NDArray& array) {
  if (array.byte_offset_ != 0 || array.IsDefaultData()) return nullptr;
  const auto* memory = reinterpret_cast<const MemoryMirror*>(array.ptr_->mkl_mem_.get());
  return &memory->description.data;
}

// Dense memory whose dimensions lie in the order 0, 2, 3, ..., innermost first from `inner` values
// on; `channels` is how many values apart two channels, or blocks of channels, are.
bool HasStrides(const dnnl_memory_desc_t& d, int64_t inner, int64_t channels, int64_t blocks) {
  const int64_t* strides = d.format_desc.blocking.strides;
  int64_t expected = inner;
  for (int i = d.ndims - 1; i >= 2; --i) {
    if (d.dims[i] != 1 && strides[i] != expected) return false;
    expected *= d.dims[i];
  }
  if (blocks != 1 && strides[1] != (channels == 0 ? expected : channels)) return false;
  return d.dims[0] == 1 || strides[0] == expected * (channels == 0 ? blocks : 1);
}

}  // namespace

bool Look(const mxnet::NDArray& array, View* view) {
  const dnnl_memory_desc_t* description = Description(array);
  if (description == nullptr) return false;
  const dnnl_memory_desc_t& d = *description;
  const mxnet::TShape& shape = array.shape();
  if (d.format_kind != dnnl_blocked || d.data_type != dnnl_f32 || d.offset0 != 0 ||
      d.extra.flags != 0 || d.ndims != shape.ndim() || d.ndims < 3) {
    return false;
  }
  int64_t inner = 1;
  for (int i = 0; i < d.ndims; ++i) {
    if (d.dims[i] != shape[i] || d.padded_dims[i] != d.dims[i]) return false;
    if (i >= 2) inner *= d.dims[i];
  }
  const dnnl_blocking_desc_t& blocking = d.format_desc.blocking;
  const int64_t channels = d.dims[1];
  if (blocking.inner_nblks == 0) {  // channels-last
    *view = View{d.dims[0] * inner, channels, 1, 1};
    return HasStrides(d, channels, 1, channels);
  }
  const int64_t block = blocking.inner_blks[0];
  if (blocking.inner_nblks != 1 || blocking.inner_idxs[0] != 1 || (block != 8 && block != 16)) {
    return false;
  }
  *view = View{d.dims[0], channels, inner, block};
  return HasStrides(d, block, 0, channels / block);
}

bool SameLayout(const mxnet::NDArray& a, const mxnet::NDArray& b) {
  const dnnl_memory_desc_t *da = Description(a), *db = Description(b);
  return da != nullptr && db != nullptr && std::memcmp(da, db, sizeof *da) == 0;
}

void* Memory(const mxnet::NDArray& array) {
  return static_cast<char*>(array.ptr_->shandle.dptr) + array.byte_offset_;
}

bool LayOutLike(const mxnet::NDArray& like, const mxnet::NDArray& out) {
  if (out.IsView() || out.byte_offset_ != 0) return false;
  mkldnn::memory::desc description;
  description.data = *Description(like);
  // Allocates the memory, and notes the layout in the array, which all copies of it share.
  const bool done = const_cast<mxnet::NDArray&>(out).CreateMKLDNNData(description) != nullptr;
  // That left something in the thread's stream, which would grow until a oneDNN operator runs
  // there.
  mxnet::MKLDNNStream::Get()->Submit(true);
  return done;
}

void MakePlain(const mxnet::NDArray& array) { array.ptr_->Reorder2Default(); }

}  // namespace onednn
}  // namespace mxbn
