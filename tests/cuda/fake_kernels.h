// Between fake_runtime.c and fake_kernels.cc.
#ifndef MXBN_TESTS_CUDA_FAKE_KERNELS_H_
#define MXBN_TESTS_CUDA_FAKE_KERNELS_H_

#ifdef __cplusplus
extern "C"
#endif
    // Runs the kernel of this mangled name; 0: it is none of those that are known.
    int fake_kernels_run(const char* name, void** arguments);

#endif  // MXBN_TESTS_CUDA_FAKE_KERNELS_H_
