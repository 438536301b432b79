#include "batch_norm_gpu.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda_driver.h"

namespace mxbn {
namespace gpu {
namespace {

constexpr int64_t kBlocks = 1024;    // about so many, to occupy a GPU of any size
constexpr int64_t kMinAccesses = 8;  // of each thread, so that its sums are few beside its values
constexpr int64_t kBytes[] = {2, 4, 8};
const char* const kSuffixes[] = {"_float16", "_float32", "_float64"};

bool IsAligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAccessBytes == 0;
}

int64_t Size(const Arguments& a) { return a.outer * a.channels * a.inner; }
// Values, all of which are taken in one access or none.
int64_t RowLength(const Arguments& a) { return a.columns ? a.channels * a.inner : a.inner; }
// Of a row.
int64_t Accesses(const Arguments& a, DataType type) {
  return RowLength(a) / (a.vectors ? kAccessBytes / kBytes[type] : 1);
}

class Launcher {
 public:
  Launcher(const Arguments& arguments, DataType type, const Queue& queue)
      : a_(arguments),
        suffix_(kSuffixes[type]),
        accesses_(Accesses(a_, type)),
        queue_(queue),
        device_(cuda::Device::Get(queue.device)) {}

  // One of the kernels that go through the tensor.
  void OverTensor(const std::string& name) const {
    const int64_t across = a_.columns ? CeilDiv(accesses_, a_.lanes) : a_.channels;
    Launch(name + (a_.columns ? "_columns" : "_rows"), across, a_.splits);
  }

  // One of the kernels with a warp per channel, or per piece of one.
  void OverChannels(const std::string& name, int64_t pieces = 1) const {
    Launch(name, CeilDiv(a_.channels * pieces, kThreads / kWarp), 1);
  }

  // The one with some values per thread.
  void OverValues(const std::string& name) const {
    Launch(name, CeilDiv(Size(a_), kThreads * kSecondValues), 1);
  }

 private:
  void Launch(const std::string& name, int64_t grid_x, int64_t grid_y) const {
    device_.Launch("mxbn_" + name + suffix_, static_cast<unsigned>(grid_x),
                   static_cast<unsigned>(grid_y), kThreads, queue_.stream, &a_);
  }

  const Arguments& a_;
  const char* const suffix_;
  const int64_t accesses_;  // of one row
  const Queue& queue_;
  cuda::Device& device_;
};

// Some of a channel's values per warp.
void MakeSecondPlan(Arguments* arguments) {
  Arguments& a = *arguments;
  const int64_t n = a.outer * a.inner;
  const int64_t enough = CeilDiv(kBlocks * (kThreads / kWarp), a.channels);
  const int64_t splits = std::min(enough, CeilDiv(n, kWarp * kSecondValues));
  a.piece = CeilDiv(n, splits);
  a.splits = static_cast<int>(CeilDiv(n, a.piece));
}

}  // namespace

void MakePlan(const View& view, DataType type, Arguments* arguments) {
  Arguments& a = *arguments;
  a.outer = view.outer;
  a.channels = view.channels;
  a.inner = view.inner;
  a.columns = a.inner < kWarp;
  a.vectors = RowLength(a) * kBytes[type] % kAccessBytes == 0 && IsAligned(a.x) &&
              IsAligned(a.dy) && IsAligned(a.out) && IsAligned(a.fused) && IsAligned(a.daddend);
  a.lanes = 1;
  a.piece = 1;
  a.splits = 0;
  if (Size(a) == 0) return;
  if (a.second_order) return MakeSecondPlan(arguments);
  const int64_t accesses = Accesses(a, type);
  int64_t across = a.channels, depth = a.outer * accesses, at_once = kThreads;
  if (a.columns) {
    while (a.lanes < kWarp && a.lanes < accesses) a.lanes *= 2;
    across = CeilDiv(accesses, a.lanes);
    depth = a.outer;
    at_once = kThreads / a.lanes;
  }
  const int64_t most = CeilDiv(depth, at_once * kMinAccesses);
  const int64_t splits = std::max<int64_t>(1, std::min(CeilDiv(kBlocks, across), most));
  a.piece = CeilDiv(CeilDiv(depth, splits), at_once) * at_once;
  a.splits = static_cast<int>(CeilDiv(depth, a.piece));
}

size_t PartsSize(const Arguments& a) {
  if (a.second_order) return static_cast<size_t>(kSecondSums * a.splits * a.channels);
  return static_cast<size_t>(4 * a.splits * a.channels * (a.columns ? a.inner : 1));
}

size_t TermsSize(const Arguments& a) {
  return static_cast<size_t>((a.second_order ? kSecondTerms : 2) * a.channels);
}

void Forward(const Arguments& a, DataType type, const Queue& queue) {
  if (a.channels == 0) return;
  const Launcher launch(a, type, queue);
  const bool reduces = (a.use_batch || a.step) && a.batch == nullptr && Size(a) > 0;
  if (reduces) launch.OverTensor("statistics");
  launch.OverChannels("forward_finish");
  const bool fused = a.fused != nullptr || a.relu;
  if (a.out != nullptr && Size(a) > 0) launch.OverTensor(fused ? "forward_fused" : "forward");
}

void Backward(const Arguments& a, DataType type, const Queue& queue) {
  if (a.channels == 0) return;
  const Launcher launch(a, type, queue);
  const bool fused = a.fused != nullptr, wanted = a.out != nullptr || a.daddend != nullptr;
  const bool reduces = a.batch == nullptr && Size(a) > 0;
  if (reduces) launch.OverTensor(fused ? "backward_reduce_fused" : "backward_reduce");
  launch.OverChannels("backward_finish");
  if (wanted && Size(a) > 0) launch.OverTensor(fused ? "backward_fused" : "backward");
}

void Second(const Arguments& a, DataType type, const Queue& queue) {
  if (a.channels == 0) return;
  const Launcher launch(a, type, queue);
  if (Size(a) > 0) launch.OverChannels("second_reduce", a.splits);
  launch.OverChannels("second_finish");
  const bool applies = a.out != nullptr || a.for_dy != nullptr;
  if (applies && Size(a) > 0) launch.OverValues("second");
}

}  // namespace gpu
}  // namespace mxbn
