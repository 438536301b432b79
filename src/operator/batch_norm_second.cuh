// The second derivatives on a GPU: a part of batch_norm_kernels.cuh, with the formulas of
// batch_norm_second_cpu.cc. They are rare beside the other passes, so these are plain loops, small
// rather than fast, whose sums are kept in double.
#ifndef MXBN_OPERATOR_BATCH_NORM_SECOND_CUH_
#define MXBN_OPERATOR_BATCH_NORM_SECOND_CUH_

namespace mxbn {
namespace gpu {

// The sums of dy, dy * (x - m), u, u * (x - m) and u * dy, u being ddx.
enum { kSumDy, kSumDyX, kSumU, kSumUX, kSumUDy };
static_assert(kSumUDy + 1 == kSecondSums, "");
// What a channel's values are computed with.
enum { kMeanDy, kMeanU, kUToDy, kCross, kUToX, kXToX };
static_assert(kXToX + 1 == kSecondTerms, "");

// Adds up what the lanes of a warp have, in a fixed order, for all of them.
__device__ inline void AddLanes(double (&sums)[kSecondSums]) {
#pragma unroll 1
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    for (double& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
}

// One warp per piece of a channel; those next to each other have the same piece of neighbours.
template <typename T>
__device__ void SecondReduce(const Arguments& a) {
  const long long warp = WarpsChannel();  // there are as many for each piece as channels
  const long long part = warp / a.channels, channel = warp % a.channels;
  if (part >= a.splits || (!UsesBatch(a) && a.first == nullptr)) return;
  const long long n = a.outer * a.inner, start = part * a.piece;
  const long long end = start + a.piece < n ? start + a.piece : n;
  const double mean = a.saved[channel];
  double sums[kSecondSums] = {};
#pragma unroll 1
  for (long long i = start + threadIdx.x % kWarp; i < end; i += kWarp) {
    const long long row = i / a.inner;
    const long long at = (row * a.channels + channel) * a.inner + i - row * a.inner;
    const double x = At<T>(a.x, at) - mean, dy = At<T>(a.dy, at), u = At<T>(a.ddx, at);
    sums[kSumDy] += dy;
    sums[kSumDyX] += dy * x;
    sums[kSumU] += u;
    sums[kSumUX] += u * x;
    sums[kSumUDy] += u * dy;
  }
  AddLanes(sums);
  if (threadIdx.x % kWarp != 0) return;
  for (int k = 0; k < kSecondSums; ++k) {
    a.parts[(part * kSecondSums + k) * a.channels + channel] = sums[k];
  }
}

// One warp per channel.
template <typename T>
__device__ void SecondFinish(const Arguments& a) {
  using C = Compute<T>;
  const long long channel = WarpsChannel();
  if (channel >= a.channels) return;
  const bool batch = UsesBatch(a), fixed = a.gamma == nullptr;
  const double n = static_cast<double>(a.outer * a.inner);
  double sums[kSecondSums] = {};
  if (batch || a.first != nullptr) {
#pragma unroll 1
    for (int part = threadIdx.x % kWarp; part < a.splits; part += kWarp) {
      for (int k = 0; k < kSecondSums; ++k) {
        sums[k] += a.parts[(static_cast<long long>(part) * kSecondSums + k) * a.channels + channel];
      }
    }
    AddLanes(sums);
  }
  if (threadIdx.x % kWarp != 0) return;
  const double s = a.saved[a.channels + channel], scale = Gamma<C>(a, channel) * s;
  const double p = fixed ? 0.0 : static_cast<double>(static_cast<const C*>(a.ddgamma)[channel]);
  double dy_mean = 0, dy_xh = 0, u_mean = 0, u_xh = 0, k = sums[kSumUDy], slope = 0;
  if (batch && n > 0) {
    dy_mean = sums[kSumDy] / n;
    dy_xh = sums[kSumDyX] * s / n;
    u_mean = sums[kSumU] / n;
    u_xh = sums[kSumUX] * s / n;
    k -= n * (dy_mean * u_mean + dy_xh * u_xh);
    slope = scale * k / n;
  }
  const double to_xh = p - scale * u_xh, u_to_xh = -scale * dy_xh;
  slope += to_xh * dy_xh + u_to_xh * u_xh;
  double* const terms = a.terms + channel;
  terms[kMeanDy * a.channels] = dy_mean;
  terms[kMeanU * a.channels] = u_mean;
  terms[kUToDy * a.channels] = scale;
  terms[kCross * a.channels] = s * to_xh;
  terms[kUToX * a.channels] = s * u_to_xh;
  terms[kXToX * a.channels] = -s * s * slope;
  Show<C>(a.first, channel, fixed ? 0.0 : s * k, a.first_add);
}

template <typename C>
__device__ inline C Centred(C value, double centre) {
  const Split<C> split(centre);
  return (value - split.high) - split.low;
}

template <typename T>
__device__ inline void Put(void* result, long long i, Compute<T> value, bool add) {
  T* const at = static_cast<T*>(result) + i;
  Assign(at, add ? ToCompute(*at) + value : value);
}

template <typename T>
__device__ void SecondOf(const Arguments& a, long long i) {
  using C = Compute<T>;
  const long long channel = i / a.inner % a.channels;
  const auto term = [&](int which) { return a.terms[which * a.channels + channel]; };
  const auto value = [i](const void* tensor) {
    return ToCompute(static_cast<const T*>(tensor)[i]);
  };
  const C cross = static_cast<C>(term(kCross)), dy = value(a.dy);
  const C u = Centred(value(a.ddx), term(kMeanU)), x = Centred(value(a.x), a.saved[channel]);
  if (a.for_dy != nullptr) {
    const C offset = static_cast<const C*>(a.ddbeta)[channel];
    Put<T>(a.for_dy, i, static_cast<C>(term(kUToDy)) * u + cross * x + offset, a.for_dy_add);
  }
  if (a.out == nullptr) return;
  C for_x = cross * dy;
  if (UsesBatch(a)) {
    for_x = cross * Centred(dy, term(kMeanDy)) + static_cast<C>(term(kUToX)) * u +
            static_cast<C>(term(kXToX)) * x;
  }
  Put<T>(a.out, i, for_x, a.out_add);
}

template <typename T>
__device__ void Second(const Arguments& a) {
  constexpr long long kBlockValues = kThreads * kSecondValues;
  const long long size = a.outer * a.channels * a.inner, next = (blockIdx.x + 1) * kBlockValues;
  const long long end = next < size ? next : size;
#pragma unroll 1
  for (long long i = blockIdx.x * kBlockValues + threadIdx.x; i < end; i += kThreads) {
    SecondOf<T>(a, i);
  }
}

}  // namespace gpu
}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_SECOND_CUH_
