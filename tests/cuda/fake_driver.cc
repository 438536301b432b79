// A libcuda.so.1 without a GPU: what the library and MXNet use of CUDA's driver API, on the memory
// of the host, with the kernels emulated. It refuses what a driver refuses. From the environment:
//   FAKE_CUDA_DEVICES             how many GPUs there are; default 1
//   FAKE_CUDA_COMPUTE_CAPABILITY  8.0, or a list, for one GPU after the other: 7.5,8.0
//   FAKE_CUDA_FAIL                the name of a function that shall fail
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

// clang-format off: the emulation comes before what it emulates
#include "cuda_emulation.h"
#include "batch_norm_kernels.cuh"
// clang-format on

// The fake CUDA runtime's, where it is loaded too, as MXNet does: see fake_runtime.c.
#define OF_RUNTIME extern "C" __attribute__((weak, visibility("default")))
OF_RUNTIME void fake_memory_open();
OF_RUNTIME void fake_memory_close();
OF_RUNTIME int fake_memory_device(const void* pointer);
OF_RUNTIME int fake_stream_device(const void* stream);

namespace {

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kUnknown = 999,
};

enum Attribute { kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };

struct Context {
  int device;
};
struct Module {
  Context* context;
};
struct Function {
  Context* context;
  void (*kernel)(mxbn::gpu::Arguments);
};

constexpr int kMostDevices = 16;

std::mutex mutex;  // guards the lists of what was handed out
Context contexts[kMostDevices];
std::deque<Module> modules;
std::deque<Function> functions;
thread_local std::vector<Context*> current_contexts;
thread_local std::string last_error;  // of the emulation

template <typename T>
bool IsOneOf(const std::deque<T>& all, const void* handle) {
  for (const T& each : all) {
    if (&each == handle) return true;
  }
  return false;
}

const char* Environment(const char* name, const char* otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : text;
}

int DeviceCount() { return std::atoi(Environment("FAKE_CUDA_DEVICES", "1")); }

struct ComputeCapability {
  int major = 0, minor = 0;

  explicit ComputeCapability(int device) {
    std::istringstream list(Environment("FAKE_CUDA_COMPUTE_CAPABILITY", "8.0"));
    std::string entry;
    for (int i = 0; i <= device && std::getline(list, entry, ',');) ++i;
    std::sscanf(entry.c_str(), "%d.%d", &major, &minor);
  }
  bool Covers(int other_major, int other_minor) const {
    return major > other_major || (major == other_major && minor >= other_minor);
  }
};

bool ShallFail(const char* function) {
  return std::string(function) == Environment("FAKE_CUDA_FAIL", "");
}

// Machine code is an ELF file with the architecture, as in sm_80, in its flags.
Result CheckImage(const void* image, const ComputeCapability& gpu) {
  const char* const text = static_cast<const char*>(image);
  if (std::memcmp(text, "\177ELF", 4) == 0) {
    const int sm = static_cast<unsigned char>(text[48]);
    return gpu.major == sm / 10 && gpu.minor >= sm % 10 ? kSuccess : kNoBinaryForGpu;
  }
  const char* const target = std::strstr(text, ".target sm_");
  if (target == nullptr) return kInvalidImage;
  const int sm = std::atoi(target + std::strlen(".target sm_"));
  return gpu.Covers(sm / 10, sm % 10) ? kSuccess : kNoBinaryForGpu;
}

// Device memory can be touched while one of these lives.
class MemoryAccess {
 public:
  MemoryAccess() {
    if (fake_memory_open != nullptr) fake_memory_open();
  }
  ~MemoryAccess() {
    if (fake_memory_close != nullptr) fake_memory_close();
  }
};

// Whether all that a kernel is given is memory of its GPU.
bool IsMemoryOf(int device, const mxbn::gpu::Arguments& a) {
  if (fake_memory_device == nullptr) return true;
  const void* const pointers[] = {
      a.x,     a.dy,    a.out,     a.gamma,  a.beta,   a.moving_mean, a.moving_var,
      a.saved, a.parts, a.terms,   a.first,  a.second, a.counters,    a.part,
      a.batch, a.ddx,   a.ddgamma, a.ddbeta, a.for_dy, a.fused,       a.daddend};
  return std::all_of(std::begin(pointers), std::end(pointers), [device](const void* pointer) {
    return pointer == nullptr || fake_memory_device(pointer) == device;
  });
}

// Copies of the current context, whose streams do not run ahead of the host.
Result Copy(void* to, const void* from, size_t bytes, const void* of_device) {
  if (current_contexts.empty()) return kInvalidContext;
  const int device = current_contexts.back()->device;
  if (fake_memory_device != nullptr && fake_memory_device(of_device) != device) {
    return kInvalidValue;
  }
  const MemoryAccess access;
  std::memcpy(to, from, bytes);
  return kSuccess;
}

void* FindKernel(const char* name) {
  Dl_info self;
  if (std::strncmp(name, "mxbn_", 5) != 0 || dladdr(&modules, &self) == 0) return nullptr;
  void* const library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return library == nullptr ? nullptr : dlsym(library, name);
}

}  // namespace

#define FAKE_CUDA(name, ...) \
  extern "C" __attribute__((visibility("default"))) Result name(__VA_ARGS__)
#define RETURN_IF(condition, result) \
  if (condition) return result
#define MAY_FAIL RETURN_IF(ShallFail(__func__), kUnknown)

FAKE_CUDA(cuInit, unsigned) {
  MAY_FAIL;
  return DeviceCount() > 0 ? kSuccess : kNoDevice;
}

FAKE_CUDA(cuDriverGetVersion, int* version) {
  MAY_FAIL;
  *version = 11020;
  return kSuccess;
}

FAKE_CUDA(cuGetErrorString, Result error, const char** text) {
  MAY_FAIL;
  switch (error) {
    case kSuccess: *text = "no error"; break;
    case kInvalidValue: *text = "invalid argument"; break;
    case kNoDevice: *text = "no CUDA-capable device is detected"; break;
    case kInvalidDevice: *text = "invalid device ordinal"; break;
    case kInvalidImage: *text = "device kernel image is invalid"; break;
    case kInvalidContext: *text = "invalid device context"; break;
    case kNoBinaryForGpu: *text = "no kernel image is available for execution on the device"; break;
    case kInvalidHandle: *text = "invalid resource handle"; break;
    case kNotFound: *text = "named symbol not found"; break;
    case kIllegalAddress: *text = "an illegal memory access was encountered"; break;
    case kLaunchFailed: *text = last_error.c_str(); break;
    case kNotSupported: *text = "operation not supported"; break;
    case kUnknown: *text = "unknown error"; break;
    default: return kInvalidValue;
  }
  return kSuccess;
}

FAKE_CUDA(cuDeviceGetCount, int* count) {
  MAY_FAIL;
  *count = DeviceCount();
  return kSuccess;
}

FAKE_CUDA(cuDeviceGet, int* device, int number) {
  MAY_FAIL;
  RETURN_IF(number < 0 || number >= DeviceCount() || number >= kMostDevices, kInvalidDevice);
  *device = number;
  return kSuccess;
}

FAKE_CUDA(cuDeviceGetName, char* name, int size, int) {
  MAY_FAIL;
  std::snprintf(name, size, "fake GPU");
  return kSuccess;
}

FAKE_CUDA(cuDeviceGetAttribute, int* value, int attribute, int device) {
  MAY_FAIL;
  const ComputeCapability gpu(device);
  RETURN_IF(attribute != kComputeCapabilityMajor && attribute != kComputeCapabilityMinor,
            kInvalidValue);
  *value = attribute == kComputeCapabilityMajor ? gpu.major : gpu.minor;
  return kSuccess;
}

FAKE_CUDA(cuDevicePrimaryCtxRetain, void** context, int device) {
  MAY_FAIL;
  RETURN_IF(device < 0 || device >= DeviceCount(), kInvalidDevice);
  contexts[device].device = device;
  *context = &contexts[device];
  return kSuccess;
}

FAKE_CUDA(cuCtxPushCurrent_v2, void* context) {
  MAY_FAIL;
  RETURN_IF(context < contexts || context >= contexts + kMostDevices, kInvalidContext);
  current_contexts.push_back(static_cast<Context*>(context));
  return kSuccess;
}

FAKE_CUDA(cuCtxPopCurrent_v2, void** context) {
  MAY_FAIL;
  RETURN_IF(current_contexts.empty(), kInvalidContext);
  *context = current_contexts.back();
  current_contexts.pop_back();
  return kSuccess;
}

FAKE_CUDA(cuModuleLoadData, void** module, const void* image) {
  MAY_FAIL;
  RETURN_IF(current_contexts.empty(), kInvalidContext);
  Context* const context = current_contexts.back();
  const Result result = CheckImage(image, ComputeCapability(context->device));
  RETURN_IF(result != kSuccess, result);
  std::lock_guard<std::mutex> lock(mutex);
  modules.push_back({context});
  *module = &modules.back();
  return kSuccess;
}

FAKE_CUDA(cuModuleGetFunction, void** function, void* module, const char* name) {
  MAY_FAIL;
  std::lock_guard<std::mutex> lock(mutex);
  RETURN_IF(!IsOneOf(modules, module), kInvalidHandle);
  Context* const context = static_cast<Module*>(module)->context;
  RETURN_IF(current_contexts.empty() || current_contexts.back() != context, kInvalidContext);
  void* const kernel = FindKernel(name);
  RETURN_IF(kernel == nullptr, kNotFound);
  functions.push_back({context, reinterpret_cast<void (*)(mxbn::gpu::Arguments)>(kernel)});
  *function = &functions.back();
  return kSuccess;
}

FAKE_CUDA(cuLaunchKernel, void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
          unsigned block_x, unsigned block_y, unsigned block_z, unsigned, void* stream,
          void** arguments, void** extra) {
  MAY_FAIL;
  constexpr unsigned kMostX = 0x7fffffff, kMostY = 65535, kMostThreads = 1024;
  RETURN_IF(grid_x == 0 || grid_x > kMostX || grid_y == 0 || grid_y > kMostY, kInvalidValue);
  RETURN_IF(block_x == 0 || block_x > kMostThreads, kInvalidValue);
  RETURN_IF(grid_z != 1 || block_y != 1 || block_z != 1 || extra != nullptr, kNotSupported);
  {
    std::lock_guard<std::mutex> lock(mutex);
    RETURN_IF(!IsOneOf(functions, handle), kInvalidHandle);
  }
  const Function& function = *static_cast<Function*>(handle);
  RETURN_IF(current_contexts.empty() || current_contexts.back() != function.context,
            kInvalidContext);
  const int device = function.context->device;
  RETURN_IF(
      stream != nullptr && fake_stream_device != nullptr && fake_stream_device(stream) != device,
      kInvalidHandle);
  const auto& argument = *static_cast<const mxbn::gpu::Arguments*>(arguments[0]);
  RETURN_IF(!IsMemoryOf(device, argument), kIllegalAddress);
  try {
    const MemoryAccess access;
    cuda_emulation::Launch({grid_x, grid_y}, block_x, [&] { function.kernel(argument); });
  } catch (const std::exception& error) {
    last_error = error.what();
    return kLaunchFailed;
  }
  return kSuccess;
}

FAKE_CUDA(cuMemcpyDtoHAsync_v2, void* to, size_t from, size_t bytes, void*) {
  MAY_FAIL;
  const void* const address = reinterpret_cast<const void*>(from);
  return Copy(to, address, bytes, address);
}

FAKE_CUDA(cuMemcpyHtoDAsync_v2, size_t to, const void* from, size_t bytes, void*) {
  MAY_FAIL;
  void* const address = reinterpret_cast<void*>(to);
  return Copy(address, from, bytes, address);
}

FAKE_CUDA(cuStreamSynchronize, void*) {
  MAY_FAIL;
  return kSuccess;
}

// MXNet is linked to these, and our operator needs none of them.
#define NOT_SUPPORTED(name) \
  FAKE_CUDA(name) { return kNotSupported; }
NOT_SUPPORTED(cuGraphKernelNodeGetParams)
NOT_SUPPORTED(cuGraphNodeGetType)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
