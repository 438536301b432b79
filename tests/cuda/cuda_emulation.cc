// The fibers behind cuda_emulation.h. This file is compiled without sanitizers: its bookkeeping is
// not the kernels' data. It tells them about fibers and synchronization where the program has them.
#include "cuda_emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#define WEAK __attribute__((weak))  // null where the program is not built with the sanitizer
extern "C" {
WEAK void __sanitizer_start_switch_fiber(void** kept, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* kept, const void** bottom, size_t* size);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void* fiber);
WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
WEAK void __tsan_acquire(void* at);
WEAK void __tsan_release(void* at);

// Keeps the registers that a function must preserve on this stack, whose pointer goes to *from, and
// takes them from the other.
__attribute__((visibility("hidden"))) void mxbn_switch_stack(void** from, void* to);
}

asm(R"(
  .text
mxbn_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace cuda_emulation {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kNoSynchronization = 1;  // a flag of __tsan_switch_to_fiber
constexpr size_t kStackBytes = 256 << 10;

struct Stack {
  void* pointer = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
  void* asan = nullptr;
  void* tsan = nullptr;
};

// Leaves one stack for another; returns when someone comes back to it.
void Switch(Stack* from, Stack* to) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan, kNoSynchronization);
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&from->asan, to->bottom, to->size);
  }
  mxbn_switch_stack(&from->pointer, to->pointer);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(from->asan, &to->bottom, &to->size);
  }
}

// A place where threads wait for each other, as TSan sees it: all that any of them did before is
// before all that they do after. Two take turns: with one, a thread that already arrives the next
// time would seem to have done so before those that still leave.
class Meeting {
 public:
  void Next() { number_ = 1 - number_; }
  char* place() { return &places_[number_]; }

  static void Arrive(char* place) {
    if (__tsan_release) __tsan_release(place);
  }
  static void Leave(char* place) {
    if (__tsan_acquire) __tsan_acquire(place);
  }

 private:
  char places_[2] = {};
  int number_ = 0;
};

enum State { kReady, kAtBarrier, kInWarp, kDone };

struct Fiber : Thread {
  Stack stack;
  State state = kDone;
  uint64_t sent = 0, received = 0;  // in a shuffle
  int lane_mask = 0;
};

// The threads of a group that have arrived where they wait for each other.
struct Waiting {
  unsigned count = 0;
  int line = 0;
  Meeting meeting;
};

struct Warp {
  unsigned size = 0, exited = 0;
  Waiting waiting;
};

// Runs one block after the other.
class Machine {
 public:
  explicit Machine(unsigned threads)
      : fibers_(threads), warps_((threads + kWarp - 1) / kWarp), order_(threads) {
    stacks_ = mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks_ == MAP_FAILED) throw std::bad_alloc();
    for (unsigned i = 0; i < threads; ++i) {
      order_[i] = i;
      fibers_[i].thread = {i, 0};
      Stack& stack = fibers_[i].stack;
      stack.bottom = static_cast<char*>(stacks_) + i * kStackBytes;
      stack.size = kStackBytes;
      // What Switch finds there at first: six registers, and where to return to.
      void** top = reinterpret_cast<void**>(static_cast<char*>(stacks_) + (i + 1) * kStackBytes);
      stack.pointer = top - 8;
      top[-2] = reinterpret_cast<void*>(&Machine::Main);
      if (__tsan_create_fiber) stack.tsan = __tsan_create_fiber(0);
    }
  }
  ~Machine() {
    for (Fiber& fiber : fibers_) {
      if (__tsan_destroy_fiber) __tsan_destroy_fiber(fiber.stack.tsan);
    }
    munmap(stacks_, fibers_.size() * kStackBytes);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  size_t threads() const { return fibers_.size(); }

  // Throws std::runtime_error; the machine is then good for nothing more.
  void Run(Index block, unsigned seed, const std::function<void()>& kernel);

  void SyncBlock(int line);
  void JoinWarp(unsigned mask, int line);
  uint64_t ShuffleXor(unsigned mask, uint64_t value, int lane_mask, int line);

 private:
  static void Main();
  void Exit();
  void Resume(Fiber* fiber);
  void Wait(State state);
  void OpenBarrier();
  void FinishWarpOperation(unsigned warp);
  [[noreturn]] void Fail(const std::string& what);

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<unsigned> order_;
  void* stacks_ = nullptr;
  const std::function<void()>* kernel_ = nullptr;
  Stack scheduler_;
  Fiber* fiber_ = nullptr;  // that runs now
  unsigned running_ = 0;    // have not exited
  Waiting barrier_;
  Meeting start_, end_;
  std::string error_;
};

thread_local Machine* machine = nullptr;

void Machine::Run(Index block, unsigned seed, const std::function<void()>& kernel) {
  machine = this;
  kernel_ = &kernel;
  running_ = fibers_.size();
  if (__tsan_get_current_fiber) scheduler_.tsan = __tsan_get_current_fiber();
  for (Fiber& fiber : fibers_) {
    fiber.block = block;
    fiber.state = kReady;
  }
  for (unsigned i = 0; i < warps_.size(); ++i) {
    warps_[i].size = std::min<unsigned>(kWarp, fibers_.size() - i * kWarp);
    warps_[i].exited = 0;
  }
  std::minstd_rand random(seed + 31 * block.x + 17 * block.y);
  Meeting::Arrive(start_.place());
  while (running_ > 0) {
    if (seed != 0) std::shuffle(order_.begin(), order_.end(), random);
    bool progress = false;
    for (const unsigned i : order_) {
      if (fibers_[i].state != kReady) continue;
      progress = true;
      Resume(&fibers_[i]);
      if (!error_.empty()) throw std::runtime_error(error_);
    }
    if (progress) continue;
    throw std::runtime_error("deadlock: of " + std::to_string(running_) + " threads of a block, " +
                             std::to_string(barrier_.count) + " wait at a barrier (line " +
                             std::to_string(barrier_.line) + "), the others for their warps");
  }
  Meeting::Leave(end_.place());
}

// What every fiber runs: the kernel, for one block after the other.
void Machine::Main() {
  Machine* const self = machine;  // read once: later, another thread of the system may be here
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(nullptr, &self->scheduler_.bottom, &self->scheduler_.size);
  }
  for (;;) {
    Meeting::Leave(self->start_.place());
    (*self->kernel_)();
    Meeting::Arrive(self->end_.place());
    self->Exit();
  }
}

void Machine::Exit() {
  const unsigned number = fiber_->thread.x;
  Warp& warp = warps_[number / kWarp];
  --running_;
  ++warp.exited;
  if (warp.waiting.count > 0) Fail("exits while others of its warp wait for it");
  if (barrier_.count > 0 && barrier_.count == running_) OpenBarrier();
  Wait(kDone);
}

void Machine::Resume(Fiber* fiber) {
  fiber_ = fiber;
  current = fiber;
  Switch(&scheduler_, &fiber->stack);
}

void Machine::Wait(State state) {
  Fiber* const fiber = fiber_;
  fiber->state = state;
  Switch(&fiber->stack, &scheduler_);
}

void Machine::Fail(const std::string& what) {
  error_ = "thread " + std::to_string(fiber_->thread.x) + " of block (" +
           std::to_string(fiber_->block.x) + ", " + std::to_string(fiber_->block.y) + ") " + what;
  Wait(kDone);
  std::abort();  // it is never resumed
}

void Machine::OpenBarrier() {
  barrier_.count = 0;
  for (Fiber& fiber : fibers_) {
    if (fiber.state == kAtBarrier) fiber.state = kReady;
  }
}

// Threads that have exited no longer count.
void Machine::SyncBlock(int line) {
  if (barrier_.count > 0 && line != barrier_.line) {
    Fail("is at the barrier of line " + std::to_string(line) + ", others at that of line " +
         std::to_string(barrier_.line));
  }
  if (barrier_.count == 0) barrier_.meeting.Next();
  char* const place = barrier_.meeting.place();
  barrier_.line = line;
  Meeting::Arrive(place);
  if (++barrier_.count == running_) {
    OpenBarrier();
  } else {
    Wait(kAtBarrier);
  }
  Meeting::Leave(place);
}

void Machine::FinishWarpOperation(unsigned number) {
  Warp& warp = warps_[number];
  warp.waiting.count = 0;
  Fiber* const lanes = &fibers_[number * kWarp];
  for (unsigned lane = 0; lane < warp.size; ++lane) {
    lanes[lane].received = lanes[lane ^ lanes[lane].lane_mask].sent;
    lanes[lane].state = kReady;
  }
}

void Machine::JoinWarp(unsigned mask, int line) {
  const unsigned number = fiber_->thread.x / kWarp;
  Warp& warp = warps_[number];
  const auto fail = [&](const std::string& why) {
    Fail("is in the operation of its warp in line " + std::to_string(line) + why);
  };
  if (mask != 0xffffffffu) fail(", which names only some lanes");  // no kernel of ours does
  if (warp.size < kWarp || warp.exited > 0) fail(", which lacks lanes");
  if (warp.waiting.count > 0 && line != warp.waiting.line) {
    fail(", others in that of line " + std::to_string(warp.waiting.line));
  }
  if (warp.waiting.count == 0) warp.waiting.meeting.Next();
  char* const place = warp.waiting.meeting.place();
  warp.waiting.line = line;
  Meeting::Arrive(place);
  if (++warp.waiting.count == kWarp) {
    FinishWarpOperation(number);
  } else {
    Wait(kInWarp);
  }
  Meeting::Leave(place);
}

uint64_t Machine::ShuffleXor(unsigned mask, uint64_t value, int lane_mask, int line) {
  Fiber* const fiber = fiber_;
  fiber->sent = value;
  fiber->lane_mask = lane_mask % kWarp;
  JoinWarp(mask, line);
  return fiber->received;
}

// Machines are kept for the next launch: their stacks are in the cache.
std::mutex idle_mutex;
std::vector<std::unique_ptr<Machine>> idle;

std::unique_ptr<Machine> TakeMachine(unsigned threads) {
  std::lock_guard<std::mutex> lock(idle_mutex);
  if (idle.empty() || idle.back()->threads() != threads) return std::make_unique<Machine>(threads);
  std::unique_ptr<Machine> result = std::move(idle.back());
  idle.pop_back();
  return result;
}

unsigned Seed() {
  const char* const text = std::getenv("MXBN_EMULATION_SEED");
  return text == nullptr ? 0 : static_cast<unsigned>(std::atoi(text));
}

}  // namespace

void SyncBlock(int line) { machine->SyncBlock(line); }
void SyncWarp(unsigned mask, int line) { machine->JoinWarp(mask, line); }

uint64_t ShuffleXor(unsigned mask, uint64_t value, int lane_mask, int line) {
  return machine->ShuffleXor(mask, value, lane_mask, line);
}

void Launch(Index grid, unsigned threads, const std::function<void()>& kernel) {
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y;
  const unsigned workers = static_cast<unsigned>(
      std::min<uint64_t>(std::max(1u, std::thread::hardware_concurrency()), blocks));
  const unsigned seed = Seed();
  // Not seen by TSan, to which blocks of different workers are thus unordered.
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::exception_ptr> errors(workers);
  std::vector<std::unique_ptr<Machine>> machines;
  for (unsigned i = 0; i < workers; ++i) machines.push_back(TakeMachine(threads));
  const auto work = [&](unsigned worker) {
    try {
      for (uint64_t i; (i = next++) < blocks && !failed;) {
        const Index block{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x)};
        machines[worker]->Run(block, seed, kernel);
      }
    } catch (...) {
      errors[worker] = std::current_exception();
      failed = true;
    }
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < workers; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  std::lock_guard<std::mutex> lock(idle_mutex);
  for (std::unique_ptr<Machine>& each : machines) idle.push_back(std::move(each));
}

}  // namespace cuda_emulation
