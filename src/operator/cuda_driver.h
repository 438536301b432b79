// NVIDIA's driver, opened when a GPU is first used: nothing here is linked with a CUDA library.
#ifndef MXBN_OPERATOR_CUDA_DRIVER_H_
#define MXBN_OPERATOR_CUDA_DRIVER_H_

#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_map>

namespace mxbn {
namespace cuda {

// Compiled device code that is part of the library: machine code for GPUs of compute capability
// major.minor (and higher minors), or PTX, which the driver compiles for any newer one. A file that
// the build generates lists them (see build_images.py).
struct Image {
  const char* name;  // "sm_80", "compute_90"
  int major, minor;
  bool is_ptx;
  const void* code;
};
extern const Image kImages[];
extern const int kImageCount;

// The image for a GPU: its own machine code or that of the nearest lower minor, else PTX; null if
// there is none.
const Image* ChooseImage(int major, int minor);

// A GPU with our kernels loaded. All throw std::runtime_error with the driver's reason.
class Device {
 public:
  // How many GPUs the driver sees.
  static int Count();
  // The version of CUDA that the driver supports: 11020 is 11.2.
  static int DriverVersion();
  // The GPU of this number, which is MXNet's too.
  static Device& Get(int number);

  const std::string& name() const { return name_; }
  int major() const { return major_; }
  int minor() const { return minor_; }
  const Image& image() const { return *image_; }

  // Starts a kernel, whose only argument is `argument`, on the stream, and does not wait for it.
  void Launch(const std::string& kernel, unsigned grid_x, unsigned grid_y, unsigned threads,
              void* stream, const void* argument);

  // Copy, on a stream that is the calling thread's own, and wait for it.
  void CopyToHost(void* to, const void* from, size_t bytes);
  void CopyToDevice(void* to, const void* from, size_t bytes);

 private:
  explicit Device(int number);
  void* Function(const std::string& kernel);

  std::string name_;
  int major_, minor_;
  const Image* image_;
  void* context_;
  void* module_;
  std::mutex mutex_;
  std::unordered_map<std::string, void*> functions_;
};

}  // namespace cuda
}  // namespace mxbn

#endif  // MXBN_OPERATOR_CUDA_DRIVER_H_
