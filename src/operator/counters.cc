#include "counters.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace mxbn {
namespace {

std::mutex mutex;
std::unordered_map<const void*, long long*> counters;
std::atomic<bool> any{false};  // most processes count nothing, and need no lock

}  // namespace

long long* CountersOf(const void* moving_mean) {
  if (!any) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = counters.find(moving_mean);
  return found == counters.end() ? nullptr : found->second;
}

}  // namespace mxbn

// Counts, from the next forward on, what becomes of a layer, given by the address of its moving
// mean; null ends it. The caller keeps both arrays alive until then.
extern "C" __attribute__((visibility("default"))) void mxbn_count(const void* moving_mean,
                                                                  long long* values) {
  std::lock_guard<std::mutex> lock(mxbn::mutex);
  if (values != nullptr) {
    mxbn::counters[moving_mean] = values;
  } else {
    mxbn::counters.erase(moving_mean);
  }
  mxbn::any = !mxbn::counters.empty();
}
