// Loops over OpenMP's threads.
#ifndef MXBN_OPERATOR_PARALLEL_H_
#define MXBN_OPERATOR_PARALLEL_H_

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace mxbn {

// The threads of one pass over so many values, while it lives. MXNet shares our OpenMP runtime
// (libgomp), so the calling thread's limit is what OMP_NUM_THREADS and MXNet set. Passes that run
// at the same time, on several of MXNet's workers, share them. libgomp's threads do not survive a
// fork: a forked child works alone.
class Crew {
 public:
  explicit Crew(int64_t values) {
    static bool forked = false;
    static const bool watching = [] {
      return pthread_atfork(nullptr, nullptr, [] { forked = true; }) == 0;
    }();
    constexpr int64_t kValuesPerThread = 1 << 14;
    const int crews = ++Crews();
    if (forked || !watching || omp_in_parallel()) return;
    const int64_t useful = values / kValuesPerThread;
    const int64_t fair = omp_get_max_threads() / crews;
    threads_ = static_cast<int>(std::max<int64_t>(1, std::min(useful, fair)));
  }
  ~Crew() { --Crews(); }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int threads() const { return threads_; }

  // f(0) ... f(count - 1) in any order; f must not throw.
  template <typename F>
  void Do(int64_t count, const F& f) const {
    if (threads_ == 1) {
      for (int64_t i = 0; i < count; ++i) f(i);
      return;
    }
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t i = 0; i < count; ++i) f(i);
  }

 private:
  static std::atomic<int>& Crews() {
    static std::atomic<int> crews{0};
    return crews;
  }

  int threads_ = 1;
};

}  // namespace mxbn

#endif  // MXBN_OPERATOR_PARALLEL_H_
