// Vectors of the instruction set that this file is compiled for (GCC's vector types), and their
// loads and stores. Everything lies in a namespace of its own per instruction set, so that the
// linker never takes AVX-512 code for a processor without it.
#ifndef MXBN_OPERATOR_VECTOR_H_
#define MXBN_OPERATOR_VECTOR_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "float16.h"

namespace mxbn {
namespace MXBN_INSTRUCTION_SET {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename C>
struct VectorOf {
  typedef C type __attribute__((vector_size(kVectorBytes)));
};
template <typename C>
using Vector = typename VectorOf<C>::type;
using Doubles = Vector<double>;

template <typename C>
constexpr int Lanes() {
  return kVectorBytes / static_cast<int>(sizeof(C));
}
constexpr int kDoubles = Lanes<double>();

// One stored value as a value to compute with, and back.
inline float ToCompute(float value) { return value; }
inline double ToCompute(double value) { return value; }
template <typename T, typename C>
inline T FromCompute(C value) {
  return value;
}
#if defined(__F16C__)
inline float ToCompute(Half value) { return _cvtsh_ss(value.bits); }
template <>
inline Half FromCompute<Half, float>(float value) {
  return Half{static_cast<uint16_t>(_cvtss_sh(value, 0))};
}
#else
inline float ToCompute(Half value) { return HalfToFloat(value); }
template <>
inline Half FromCompute<Half, float>(float value) {
  return FloatToHalf(value);
}
#endif

template <typename C>
inline Vector<C> Broadcast(C value) {
  return Vector<C>{} + value;
}

// Lanes<C>() stored values as a vector to compute with, and back; no alignment needed.
template <typename V>
inline V LoadBytes(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vector<float> Load(const float* p) { return LoadBytes<Vector<float>>(p); }
inline Vector<double> Load(const double* p) { return LoadBytes<Vector<double>>(p); }
inline void Store(float* p, Vector<float> v) { std::memcpy(p, &v, sizeof v); }
inline void Store(double* p, Vector<double> v) { std::memcpy(p, &v, sizeof v); }

// LoadDoubles: kDoubles stored values as doubles. Stream: stores past the caches, to a pointer
// aligned to the size of what is stored.
inline Doubles LoadDoubles(const double* p) { return Load(p); }

#if defined(__AVX512F__)
inline Doubles LoadDoubles(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline Doubles LoadDoubles(const Half* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtps_pd(_mm256_cvtph_ps(bits));
}
inline Vector<float> Load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void Store(Half* p, Vector<float> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, 0));
}
inline void Stream(float* p, Vector<float> v) { _mm512_stream_ps(p, v); }
inline void Stream(double* p, Vector<double> v) { _mm512_stream_pd(p, v); }
inline void Stream(Half* p, Vector<float> v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, 0));
}
#elif defined(__AVX2__)
inline Doubles LoadDoubles(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline Doubles LoadDoubles(const Half* p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtps_pd(_mm_cvtph_ps(bits));
}
inline Vector<float> Load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void Store(Half* p, Vector<float> v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
}
inline void Stream(float* p, Vector<float> v) { _mm256_stream_ps(p, v); }
inline void Stream(double* p, Vector<double> v) { _mm256_stream_pd(p, v); }
inline void Stream(Half* p, Vector<float> v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, 0));
}
#else
inline Doubles LoadDoubles(const float* p) { return Doubles{p[0], p[1]}; }
inline Doubles LoadDoubles(const Half* p) { return Doubles{ToCompute(p[0]), ToCompute(p[1])}; }
inline Vector<float> Load(const Half* p) {
  return Vector<float>{ToCompute(p[0]), ToCompute(p[1]), ToCompute(p[2]), ToCompute(p[3])};
}
inline void Store(Half* p, Vector<float> v) {
  for (int i = 0; i < Lanes<float>(); ++i) p[i] = FromCompute<Half>(v[i]);
}
inline void Stream(float* p, Vector<float> v) { _mm_stream_ps(p, v); }
inline void Stream(double* p, Vector<double> v) { _mm_stream_pd(p, v); }
inline void Stream(Half* p, Vector<float> v) { Store(p, v); }
#endif

}  // namespace MXBN_INSTRUCTION_SET
}  // namespace mxbn

#endif  // MXBN_OPERATOR_VECTOR_H_
