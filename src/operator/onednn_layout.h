// Arrays in the layouts that MXNet's oneDNN operators leave behind, taken as they are: blocked by 8
// or 16 channels (training), or channels-last (inference).
#ifndef MXBN_OPERATOR_ONEDNN_LAYOUT_H_
#define MXBN_OPERATOR_ONEDNN_LAYOUT_H_

#include <mxnet/ndarray.h>

#include "batch_norm.h"

namespace mxbn {
namespace onednn {

// Whether `array` is in one of these layouts, with channels on axis 1 of float32; then also how.
bool Look(const mxnet::NDArray& array, View* view);

bool SameLayout(const mxnet::NDArray& a, const mxnet::NDArray& b);

// The memory of an array, whatever its layout.
void* Memory(const mxnet::NDArray& array);

// Lays `out`, whose values are about to be written, out like `like`; false if it cannot be.
bool LayOutLike(const mxnet::NDArray& like, const mxnet::NDArray& out);

// Brings an array into MXNet's plain layout where it lies.
void MakePlain(const mxnet::NDArray& array);

}  // namespace onednn
}  // namespace mxbn

#endif  // MXBN_OPERATOR_ONEDNN_LAYOUT_H_
