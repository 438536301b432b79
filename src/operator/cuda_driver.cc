#include "cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <stdexcept>

namespace mxbn {
namespace cuda {
namespace {

using Result = int;                                        // CUresult
using DeviceHandle = int;                                  // CUdevice
using Address = size_t;                                    // CUdeviceptr
void* const kStreamOfThread = reinterpret_cast<void*>(2);  // CU_STREAM_PER_THREAD

enum Attribute { kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };

// The functions of libcuda.so.1 that are used, with the names that they have there.
struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuDriverGetVersion)(int* version);
  Result (*cuGetErrorString)(Result error, const char** text);
  Result (*cuDeviceGetCount)(int* count);
  Result (*cuDeviceGet)(DeviceHandle* device, int number);
  Result (*cuDeviceGetName)(char* name, int size, DeviceHandle device);
  Result (*cuDeviceGetAttribute)(int* value, int attribute, DeviceHandle device);
  Result (*cuDevicePrimaryCtxRetain)(void** context, DeviceHandle device);
  Result (*cuCtxPushCurrent)(void* context);
  Result (*cuCtxPopCurrent)(void** context);
  Result (*cuModuleLoadData)(void** module, const void* image);
  Result (*cuModuleGetFunction)(void** function, void* module, const char* name);
  Result (*cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z,
                           unsigned shared_bytes, void* stream, void** arguments, void** extra);
  Result (*cuMemcpyDtoHAsync)(void* to, Address from, size_t bytes, void* stream);
  Result (*cuMemcpyHtoDAsync)(Address to, const void* from, size_t bytes, void* stream);
  Result (*cuStreamSynchronize)(void* stream);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
    const auto find = [library](auto* function, const char* name) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
      if (*function == nullptr) {
        throw std::runtime_error(std::string("the CUDA driver is too old: it lacks ") + name);
      }
    };
    find(&cuInit, "cuInit");
    find(&cuDriverGetVersion, "cuDriverGetVersion");
    find(&cuGetErrorString, "cuGetErrorString");
    find(&cuDeviceGetCount, "cuDeviceGetCount");
    find(&cuDeviceGet, "cuDeviceGet");
    find(&cuDeviceGetName, "cuDeviceGetName");
    find(&cuDeviceGetAttribute, "cuDeviceGetAttribute");
    find(&cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(&cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    find(&cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    find(&cuModuleLoadData, "cuModuleLoadData");
    find(&cuModuleGetFunction, "cuModuleGetFunction");
    find(&cuLaunchKernel, "cuLaunchKernel");
    find(&cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    find(&cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    find(&cuStreamSynchronize, "cuStreamSynchronize");
    Check(cuInit(0), "cuInit");
  }

  void Check(Result result, const std::string& what) const {
    if (result == 0) return;
    const char* text = nullptr;
    if (cuGetErrorString(result, &text) != 0 || text == nullptr) text = "unknown error";
    throw std::runtime_error(what + ": CUDA error " + std::to_string(result) + " (" + text + ")");
  }
};

// Opened at first use; where that failed, the next use tries again.
const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

// Makes a context current for the calling thread, while it lives.
class Current {
 public:
  explicit Current(void* context) {
    TheDriver().Check(TheDriver().cuCtxPushCurrent(context), "cuCtxPushCurrent");
  }
  ~Current() {
    void* context;
    TheDriver().cuCtxPopCurrent(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

}  // namespace

const Image* ChooseImage(int major, int minor) {
  const Image* best = nullptr;
  for (int i = 0; i < kImageCount; ++i) {
    const Image& image = kImages[i];
    if (image.is_ptx || image.major != major || image.minor > minor) continue;
    if (best == nullptr || image.minor > best->minor) best = &image;
  }
  for (int i = 0; i < kImageCount && best == nullptr; ++i) {
    const Image& image = kImages[i];
    const bool newer = major > image.major || (major == image.major && minor >= image.minor);
    if (image.is_ptx && newer) best = &image;
  }
  return best;
}

int Device::Count() {
  int count = 0;
  TheDriver().Check(TheDriver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

int Device::DriverVersion() {
  int version = 0;
  TheDriver().Check(TheDriver().cuDriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

Device& Device::Get(int number) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<Device>> devices;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = devices[number];
  if (device == nullptr) device.reset(new Device(number));
  return *device;
}

Device::Device(int number) {
  const Driver& driver = TheDriver();
  DeviceHandle handle;
  driver.Check(driver.cuDeviceGet(&handle, number), "cuDeviceGet");
  char name[256] = "";
  driver.Check(driver.cuDeviceGetName(name, sizeof name, handle), "cuDeviceGetName");
  name_ = name;
  const auto attribute = [&](Attribute which) {
    int value;
    driver.Check(driver.cuDeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
    return value;
  };
  major_ = attribute(kComputeCapabilityMajor);
  minor_ = attribute(kComputeCapabilityMinor);
  image_ = ChooseImage(major_, minor_);
  if (image_ == nullptr) {
    throw std::runtime_error("no kernels for " + name_ + ", whose compute capability is " +
                             std::to_string(major_) + "." + std::to_string(minor_));
  }
  // MXNet uses the same context, which lives as long as the process.
  driver.Check(driver.cuDevicePrimaryCtxRetain(&context_, handle), "cuDevicePrimaryCtxRetain");
  const Current current(context_);
  driver.Check(driver.cuModuleLoadData(&module_, image_->code),
               std::string("cuModuleLoadData of ") + image_->name);
}

void* Device::Function(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  void*& function = functions_[kernel];
  if (function == nullptr) {
    TheDriver().Check(TheDriver().cuModuleGetFunction(&function, module_, kernel.c_str()), kernel);
  }
  return function;
}

void Device::Launch(const std::string& kernel, unsigned grid_x, unsigned grid_y, unsigned threads,
                    void* stream, const void* argument) {
  const Current current(context_);
  void* arguments[] = {const_cast<void*>(argument)};
  TheDriver().Check(TheDriver().cuLaunchKernel(Function(kernel), grid_x, grid_y, 1, threads, 1, 1,
                                               0, stream, arguments, nullptr),
                    kernel);
}

void Device::CopyToHost(void* to, const void* from, size_t bytes) {
  const Driver& driver = TheDriver();
  const Current current(context_);
  driver.Check(
      driver.cuMemcpyDtoHAsync(to, reinterpret_cast<Address>(from), bytes, kStreamOfThread),
      "cuMemcpyDtoHAsync");
  driver.Check(driver.cuStreamSynchronize(kStreamOfThread), "cuStreamSynchronize");
}

void Device::CopyToDevice(void* to, const void* from, size_t bytes) {
  const Driver& driver = TheDriver();
  const Current current(context_);
  driver.Check(
      driver.cuMemcpyHtoDAsync(reinterpret_cast<Address>(to), from, bytes, kStreamOfThread),
      "cuMemcpyHtoDAsync");
  driver.Check(driver.cuStreamSynchronize(kStreamOfThread), "cuStreamSynchronize");
}

}  // namespace cuda
}  // namespace mxbn
