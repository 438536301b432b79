// What batch_norm_kernels.cuh needs of CUDA, for g++ on a CPU. Include this before it.
//
// Every CUDA thread is a fiber, a stack of its own; those of a block take turns on one thread of
// the operating system, each until it has to wait for others, and blocks are shared out to several.
// What a GPU leaves undefined is an error here: a block's threads at different barriers, a lane
// that misses an operation of its warp, threads that wait for ever.
//
// Built with -fsanitize=thread, a race between two threads of a block is reported though they never
// run at once, since only barriers and the operations of a warp count as synchronization. With
// MXBN_EMULATION_SEED=1, 2, ... in the environment the threads take turns in a random order.
#ifndef MXBN_TESTS_CUDA_EMULATION_H_
#define MXBN_TESTS_CUDA_EMULATION_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define MXBN_CUDA_EMULATION

namespace cuda_emulation {

struct Index {
  unsigned x = 0, y = 0;
};

// The CUDA thread that runs now.
struct Thread {
  Index thread, block;
};
inline thread_local const Thread* current = nullptr;

// What threads wait for each other in. `line` is where, in the file of the kernels.
void SyncBlock(int line);
void SyncWarp(unsigned mask, int line);
uint64_t ShuffleXor(unsigned mask, uint64_t value, int lane_mask, int line);

// Calls kernel() in each of `threads` CUDA threads of grid.x * grid.y blocks, and waits for them.
// Throws std::runtime_error.
void Launch(Index grid, unsigned threads, const std::function<void()>& kernel);

template <typename T>
T ShuffleXor(unsigned mask, T value, int lane_mask, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle is of up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = ShuffleXor(mask, bits, lane_mask, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned long long AtomicAdd(unsigned long long* sum, unsigned long long term) {
  return __atomic_fetch_add(sum, term, __ATOMIC_RELAXED);
}

}  // namespace cuda_emulation

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long term) {
  return __atomic_fetch_add(at, term, __ATOMIC_RELAXED);
}

#define __global__ __attribute__((visibility("default")))  // to be found by dlsym
#define __device__
#define __noinline__  // not its attribute of GCC, whose headers use the word too
#define __launch_bounds__(...)
#define __shared__ static thread_local  // a thread of the system runs one block at a time
#define threadIdx (cuda_emulation::current->thread)
#define blockIdx (cuda_emulation::current->block)
#define atomicAdd cuda_emulation::AtomicAdd
#define __syncthreads() cuda_emulation::SyncBlock(__LINE__)
#define __syncwarp() cuda_emulation::SyncWarp(0xffffffffu, __LINE__)
#define __shfl_xor_sync(mask, value, lane_mask) \
  cuda_emulation::ShuffleXor(mask, value, lane_mask, __LINE__)

#endif  // MXBN_TESTS_CUDA_EMULATION_H_
