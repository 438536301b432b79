// A fake libcudart.so.11.0: mx.gpu(i) works in the mxnet-cu112 wheel on a machine without a GPU.
//
// Device memory lies in the host's, but can be touched only while this library copies or fills, or
// the fake driver runs a kernel: host code that follows a pointer to the device dies. Streams are
// synchronous. Of MXNet's own kernels those in fake_kernels.cc run; the others are refused with an
// error that says so. The environment variable FAKE_CUDA_DEVICES is the number of GPUs, 1 by
// default.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_kernels.h"

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNoKernelImage = 209,
  kPeerAccessUnsupported = 217,
  kInvalidHandle = 400,
  kNotSupported = 801,
};
typedef struct {
  unsigned x, y, z;
} Dim3;
typedef struct {
  int device;
} Stream;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;
static __thread int last_error;
static __thread char error_text[600] = "fake CUDA runtime: an error";

static int Fail(int error) { return last_error = error; }
static int Devices(void) {
  const char* number = getenv("FAKE_CUDA_DEVICES");
  return number == NULL ? 1 : atoi(number);
}

// ------------------------------------------------------------------------------- device memory

#define MEMORY_SIZE ((size_t)16 << 30)  // of all devices together
#define ALIGNMENT 512

typedef struct {
  char* start;
  size_t size;
  int device;
} Block;
static char* memory;
static Block* blocks;  // in the order of their addresses
static size_t block_count;
static int users;  // kernels and copies that are under way

static void Protect(int protection) {
  if (memory != NULL && mprotect(memory, MEMORY_SIZE, protection) != 0) abort();
}

// Lets device memory be touched until the matching fake_memory_close, also from other threads. The
// fake driver calls both around a kernel.
void fake_memory_open(void) {
  pthread_mutex_lock(&mutex);
  if (users++ == 0) Protect(PROT_READ | PROT_WRITE);
  pthread_mutex_unlock(&mutex);
}
void fake_memory_close(void) {
  pthread_mutex_lock(&mutex);
  if (--users == 0) Protect(PROT_NONE);
  pthread_mutex_unlock(&mutex);
}

// The number of the GPU whose memory this is; -1: it is none's.
int fake_memory_device(const void* pointer) {
  const char* p = pointer;
  int found = -1;
  pthread_mutex_lock(&mutex);
  for (size_t i = 0; i < block_count; ++i) {
    if (blocks[i].start <= p && p < blocks[i].start + blocks[i].size) found = blocks[i].device;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

// The number of the GPU that a stream belongs to.
int fake_stream_device(const void* stream) { return ((const Stream*)stream)->device; }

static char* TakeBlock(size_t size) {
  pthread_mutex_lock(&mutex);
  if (memory == NULL) {
    memory = mmap(NULL, MEMORY_SIZE, users == 0 ? PROT_NONE : PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
  }
  char* at = memory;
  size_t i = 0;
  for (; i < block_count && (size_t)(blocks[i].start - at) < size; ++i) {
    at = blocks[i].start + blocks[i].size;
  }
  if (at + size > memory + MEMORY_SIZE) {
    at = NULL;
  } else {
    blocks = realloc(blocks, (block_count + 1) * sizeof *blocks);
    memmove(blocks + i + 1, blocks + i, (block_count - i) * sizeof *blocks);
    blocks[i] = (Block){at, size, device};
    ++block_count;
  }
  pthread_mutex_unlock(&mutex);
  return at;
}

int cudaMalloc(void** pointer, size_t size) {
  size = (size / ALIGNMENT + 1) * ALIGNMENT;
  *pointer = TakeBlock(size);
  if (*pointer == NULL) return Fail(kOutOfMemory);
  fake_memory_open();
  memset(*pointer, 0xff, size);  // NaN in every type
  fake_memory_close();
  return kSuccess;
}

int cudaFree(void* pointer) {
  if (pointer == NULL) return kSuccess;
  int error = kInvalidValue;
  pthread_mutex_lock(&mutex);
  for (size_t i = 0; i < block_count; ++i) {
    if (blocks[i].start != pointer) continue;
    --block_count;
    memmove(blocks + i, blocks + i + 1, (block_count - i) * sizeof *blocks);
    error = kSuccess;
    break;
  }
  pthread_mutex_unlock(&mutex);
  return error == kSuccess ? kSuccess : Fail(error);
}

int cudaMallocPitch(void** pointer, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return cudaMalloc(pointer, *pitch * height);
}

int cudaHostAlloc(void** pointer, size_t size, unsigned flags) {
  (void)flags;
  *pointer = malloc(size);
  return *pointer == NULL ? Fail(kOutOfMemory) : kSuccess;
}
int cudaFreeHost(void* pointer) {
  free(pointer);
  return kSuccess;
}

int cudaMemGetInfo(size_t* free_size, size_t* total) {
  *free_size = MEMORY_SIZE / 2;
  *total = MEMORY_SIZE;
  return kSuccess;
}

int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  (void)kind, (void)stream;
  fake_memory_open();
  for (size_t i = 0; i < height; ++i) {
    memmove((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
  }
  fake_memory_close();
  return kSuccess;
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return cudaMemcpy2DAsync(to, size, from, size, size, 1, kind, stream);
}
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  return cudaMemcpyAsync(to, from, size, kind, NULL);
}
int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size,
                        void* stream) {
  (void)to_device, (void)from_device;
  return cudaMemcpyAsync(to, from, size, 0, stream);
}
int cudaMemsetAsync(void* pointer, int value, size_t size, void* stream) {
  (void)stream;
  fake_memory_open();
  memset(pointer, value, size);
  fake_memory_close();
  return kSuccess;
}

// --------------------------------------------------------------------------- devices and streams

int cudaGetDeviceCount(int* count) {
  *count = Devices();
  return *count > 0 ? kSuccess : Fail(kNoDevice);
}
int cudaGetDevice(int* number) {
  *number = device;
  return kSuccess;
}
int cudaSetDevice(int number) {
  if (number < 0 || number >= Devices()) return Fail(kInvalidDevice);
  device = number;
  return kSuccess;
}
int cudaDriverGetVersion(int* version) {
  *version = 11020;
  return kSuccess;
}

// What MXNet asks for.
int cudaDeviceGetAttribute(int* value, int attribute, int number) {
  (void)number;
  switch (attribute) {
    case 1: *value = 1024; break;   // threads per block
    case 8: *value = 49152; break;  // shared memory per block
    case 10: *value = 32; break;    // threads per warp
    case 16: *value = 80; break;    // multiprocessors
    case 75: *value = 8; break;     // compute capability
    case 76: *value = 0; break;
    default: *value = 1;
  }
  return kSuccess;
}
int cudaGetDeviceProperties(void* properties, int number) {
  (void)number;
  memset(properties, 0, 728);  // the size in CUDA 11.2
  strcpy(properties, "fake GPU");
  return kSuccess;
}
int cudaDeviceCanAccessPeer(int* can, int one, int other) {
  (void)one, (void)other;
  *can = 0;
  return kSuccess;
}
int cudaDeviceEnablePeerAccess(int other, unsigned flags) {
  (void)other, (void)flags;
  return Fail(kPeerAccessUnsupported);
}
int cudaDeviceGetP2PAttribute(int* value, int attribute, int one, int other) {
  (void)attribute, (void)one, (void)other;
  *value = 0;
  return kSuccess;
}

int cudaStreamCreate(void** stream) {
  Stream* made = malloc(sizeof *made);
  made->device = device;
  *stream = made;
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  free(stream);
  return kSuccess;
}
int cudaEventCreateWithFlags(void** event, unsigned flags) {
  (void)flags;
  *event = malloc(1);
  return kSuccess;
}
int cudaEventDestroy(void* event) {
  free(event);
  return kSuccess;
}

// There is nothing to wait for.
int cudaDeviceSynchronize(void) { return kSuccess; }
int cudaStreamSynchronize(void* stream) { return (void)stream, kSuccess; }
int cudaEventRecord(void* event, void* stream) { return (void)event, (void)stream, kSuccess; }
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return (void)stream, (void)event, (void)flags, kSuccess;
}

// --------------------------------------------------------------------------------------- errors

int cudaGetLastError(void) {
  const int error = last_error;
  last_error = kSuccess;
  return error;
}
int cudaPeekAtLastError(void) { return last_error; }
const char* cudaGetErrorString(int error) { return error == kSuccess ? "no error" : error_text; }
const char* cudaGetErrorName(int error) { return error == kSuccess ? "cudaSuccess" : "fakeError"; }

// ------------------------------------------------------------------------------- MXNet's kernels

typedef struct {
  const void* function;
  const char* name;  // mangled, as the compiler registers it
} Kernel;
static Kernel* kernels;
static size_t kernel_count, kernel_room;

static int ByFunction(const void* a, const void* b) {
  const char *one = ((const Kernel*)a)->function, *other = ((const Kernel*)b)->function;
  return (one > other) - (one < other);
}
static void SortKernels(void) { qsort(kernels, kernel_count, sizeof *kernels, ByFunction); }

void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  (void)binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
char __cudaInitModule(void** handle) { return (void)handle, 1; }
void __cudaRegisterVar(void** handle, char* host, char* address, const char* name, int external,
                       size_t size, int constant, int global) {
  (void)handle, (void)host, (void)address, (void)name;
  (void)external, (void)size, (void)constant, (void)global;
}
void __cudaRegisterFunction(void** handle, const char* function, char* device_function,
                            const char* name, int thread_limit, void* tid, void* bid, void* bdim,
                            void* gdim, int* warp_size) {
  (void)handle, (void)device_function, (void)thread_limit;
  (void)tid, (void)bid, (void)bdim, (void)gdim, (void)warp_size;
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room == 0 ? 1 << 17 : 2 * kernel_room;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (Kernel){function, name};
}

static __thread struct {
  Dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return kSuccess;
}

int cudaFuncGetAttributes(void* attributes, const void* function) {
  (void)function;
  memset(attributes, 0, 56);
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_of_it, const void* function,
                                                           int threads, size_t shared,
                                                           unsigned flags) {
  (void)function, (void)threads, (void)shared, (void)flags;
  *blocks_of_it = 1;
  return kSuccess;
}

int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments, size_t shared,
                     void* stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  static pthread_once_t sorted = PTHREAD_ONCE_INIT;
  pthread_once(&sorted, SortKernels);
  const Kernel key = {function, NULL};
  const Kernel* kernel = bsearch(&key, kernels, kernel_count, sizeof key, ByFunction);
  if (kernel == NULL) return Fail(kInvalidHandle);
  fake_memory_open();
  const int done = fake_kernels_run(kernel->name, arguments);
  fake_memory_close();
  if (done) return last_error = kSuccess;
  snprintf(error_text, sizeof error_text, "MXNet's own kernels do not run on the fake GPU: %s",
           kernel->name);
  return Fail(kNoKernelImage);
}

// CUDA graphs, which MXNet uses only when it is asked to.
#define NOT_SUPPORTED(function) \
  int function(void) { return Fail(kNotSupported); }
NOT_SUPPORTED(cudaGraphDestroy)
NOT_SUPPORTED(cudaGraphExecDestroy)
NOT_SUPPORTED(cudaGraphExecUpdate)
NOT_SUPPORTED(cudaGraphGetNodes)
NOT_SUPPORTED(cudaGraphInstantiate)
NOT_SUPPORTED(cudaGraphLaunch)
NOT_SUPPORTED(cudaGraphMemcpyNodeGetParams)
NOT_SUPPORTED(cudaGraphMemsetNodeGetParams)
NOT_SUPPORTED(cudaStreamBeginCapture)
NOT_SUPPORTED(cudaStreamEndCapture)
