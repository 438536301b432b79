// Loops over OpenMP's threads.
#ifndef MXBN_OPERATOR_PARALLEL_H_
#define MXBN_OPERATOR_PARALLEL_H_

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>

namespace mxbn {

// How many threads pay for work on so many values. MXNet shares our OpenMP runtime (libgomp), so
// the calling thread's limit is what OMP_NUM_THREADS and MXNet set. libgomp's threads do not
// survive a fork: a forked child works alone.
inline int Threads(int64_t values) {
  static bool forked = false;
  static const bool watching = [] {
    return pthread_atfork(nullptr, nullptr, [] { forked = true; }) == 0;
  }();
  constexpr int64_t kValuesPerThread = 1 << 14;
  if (forked || !watching || omp_in_parallel()) return 1;
  const int64_t useful = std::max<int64_t>(1, values / kValuesPerThread);
  return static_cast<int>(std::min<int64_t>(omp_get_max_threads(), useful));
}

// f(0) ... f(count - 1) in any order; f must not throw.
template <typename F>
void Parallel(int64_t count, int threads, const F& f) {
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) f(i);
}

}  // namespace mxbn

#endif  // MXBN_OPERATOR_PARALLEL_H_
