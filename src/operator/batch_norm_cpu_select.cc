// Picks the kernels for the processor at hand.
#include <cstdlib>
#include <cstring>

#include "batch_norm_cpu_kernels.h"

namespace mxbn {

#define MXBN_DECLARE_TABLE(instruction_set) \
  namespace instruction_set {               \
  template <typename T>                     \
  const Kernels<T>& Table();                \
  }
MXBN_DECLARE_TABLE(avx512)
MXBN_DECLARE_TABLE(avx2)
MXBN_DECLARE_TABLE(baseline)
#undef MXBN_DECLARE_TABLE

const char* InstructionSet() {
  static const char* const chosen = [] {
    // MXBN_INSTRUCTION_SET=avx2 or baseline asks for less than the processor has (to test it).
    const char* most = std::getenv("MXBN_INSTRUCTION_SET");
    const bool any = most == nullptr || std::strcmp(most, "avx512") == 0;
    const bool not_baseline = any || std::strcmp(most, "avx2") == 0;
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl");
    if (avx512 && any) return "avx512";
    if (avx2 && not_baseline) return "avx2";
    return "baseline";
  }();
  return chosen;
}

template <typename T>
const Kernels<T>& SelectKernels() {
  static const Kernels<T>& chosen =
      std::strcmp(InstructionSet(), "avx512") == 0 ? avx512::Table<T>()
      : std::strcmp(InstructionSet(), "avx2") == 0 ? avx2::Table<T>()
                                                   : baseline::Table<T>();
  return chosen;
}

template const Kernels<Half>& SelectKernels<Half>();
template const Kernels<float>& SelectKernels<float>();
template const Kernels<double>& SelectKernels<double>();

}  // namespace mxbn
