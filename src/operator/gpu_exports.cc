// The GPU half for callers without MXNet's: on raw pointers, by mxbn/_gpu.py. What went wrong is
// returned as a text, which holds until the thread's next call; null: nothing.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "batch_norm_gpu.h"
#include "cuda_driver.h"

#define MXBN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <typename F>
const char* Try(F f) {
  static thread_local std::string error;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

}  // namespace

// A GPU, as mxbn.runtime.info() tells about it.
struct MxbnGpu {
  char name[256];
  int major, minor;
  char image[32];
};

MXBN_EXPORT const char* mxbn_gpu_count(int* count, int* driver_version) {
  return Try([=] {
    *driver_version = mxbn::cuda::Device::DriverVersion();
    *count = mxbn::cuda::Device::Count();
  });
}

MXBN_EXPORT const char* mxbn_gpu_describe(int number, MxbnGpu* gpu) {
  return Try([=] {
    const mxbn::cuda::Device& device = mxbn::cuda::Device::Get(number);
    std::strncpy(gpu->name, device.name().c_str(), sizeof gpu->name - 1);
    gpu->major = device.major();
    gpu->minor = device.minor();
    std::strncpy(gpu->image, device.image().name, sizeof gpu->image - 1);
  });
}

// Completes the arguments, of which outer, channels, inner, x, dy, out, fused, daddend and
// second_order are set, and returns how many doubles of workspace `parts`, and after it `terms`,
// need.
MXBN_EXPORT void mxbn_gpu_plan(mxbn::gpu::Arguments* arguments, int type, int64_t* parts,
                               int64_t* terms) {
  const mxbn::View view{arguments->outer, arguments->channels, arguments->inner, 1};
  mxbn::gpu::MakePlan(view, static_cast<mxbn::gpu::DataType>(type), arguments);
  *parts = static_cast<int64_t>(mxbn::gpu::PartsSize(*arguments));
  *terms = static_cast<int64_t>(mxbn::gpu::TermsSize(*arguments));
}

MXBN_EXPORT const char* mxbn_gpu_forward(const mxbn::gpu::Arguments* arguments, int type,
                                         int device, void* stream) {
  return Try([=] {
    mxbn::gpu::Forward(*arguments, static_cast<mxbn::gpu::DataType>(type), {device, stream});
  });
}

MXBN_EXPORT const char* mxbn_gpu_backward(const mxbn::gpu::Arguments* arguments, int type,
                                          int device, void* stream) {
  return Try([=] {
    mxbn::gpu::Backward(*arguments, static_cast<mxbn::gpu::DataType>(type), {device, stream});
  });
}

MXBN_EXPORT const char* mxbn_gpu_second(const mxbn::gpu::Arguments* arguments, int type, int device,
                                        void* stream) {
  return Try([=] {
    mxbn::gpu::Second(*arguments, static_cast<mxbn::gpu::DataType>(type), {device, stream});
  });
}
