// IEEE binary16 to float and back, for processors without F16C.
#ifndef MXBN_OPERATOR_FLOAT16_H_
#define MXBN_OPERATOR_FLOAT16_H_

#include <cstdint>
#include <cstring>

#include "batch_norm.h"

namespace mxbn {

inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float HalfToFloat(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
  const uint32_t magnitude = half.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return BitsToFloat(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  // Shifted into a float, the exponent is 2^-112 too small; a multiplication mends it, also for
  // subnormal values.
  return BitsToFloat(sign | FloatToBits(BitsToFloat(magnitude << 13) * 0x1p112f));
}

// Rounds to nearest, ties to even.
inline Half FloatToHalf(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;                       // NaN
  } else if (magnitude >= 0x477ff000u) {  // 65520: rounds to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; the addition rounds
    half = FloatToBits(BitsToFloat(magnitude) + 0.5f) - FloatToBits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return Half{static_cast<uint16_t>(sign | half)};
}

}  // namespace mxbn

#endif  // MXBN_OPERATOR_FLOAT16_H_
