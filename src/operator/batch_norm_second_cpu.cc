// The second derivatives on a CPU.
#include "batch_norm_cpu.h"
#include "batch_norm_cpu_kernels.h"
#include "batch_norm_cpu_schedule.h"
#include "batch_norm_cpu_terms.h"
#include "float16.h"

namespace mxbn {
namespace {

float ToCompute(Half value) { return HalfToFloat(value); }
float ToCompute(float value) { return value; }
double ToCompute(double value) { return value; }
void Assign(Half* to, float value) { *to = FloatToHalf(value); }
void Assign(float* to, float value) { *to = value; }
void Assign(double* to, double value) { *to = value; }

// A High is followed by its Low.
enum SecondTerm {
  kXHigh,
  kXLow,
  kDyHigh,
  kDyLow,
  kUHigh,
  kULow,
  kUToDy,
  kCross,  // from x to dy, and from dy to x
  kToDy,
  kUToX,
  kXToX,
  kSecondTerms
};

// The terms of a slab: single values that hold for all columns, or each column's own.
template <typename C, Layout layout>
struct Terms {
  const C* table;
  int64_t stride;

  C Get(int term, int64_t col) const {
    return table[term * stride + (layout == kOneChannel ? 0 : col)];
  }
  C Centred(C value, int high, int64_t col) const {
    return (value - Get(high, col)) - Get(high + 1, col);
  }
};

// Writes or adds formula(i, col) for every value of a slab, if its result is wanted.
template <typename T, typename Formula>
void Elementwise(const Slab& slab, const Result<T>& result, const Formula& formula) {
  T* __restrict const out = result.data;
  if (out == nullptr) return;
  for (int64_t row = 0; row < slab.rows; ++row) {
    for (int64_t col = 0; col < slab.cols; ++col) {
      const int64_t i = row * slab.stride + col;
      const ParamType<T> value = formula(i, col);
      Assign(out + i, result.add ? ToCompute(out[i]) + value : value);
    }
  }
}

// A loss has the gradients u, p and q with respect to dx, dgamma and dbeta. With s = inv_std,
// xh = (x - m) * s, n values per channel and
//   A = sum dy, B = sum dy * xh, U = sum u, V = sum u * xh, W = sum u * dy
// all of it that depends on dy, gamma, xh and s is, for statistics of the batch,
//   L = gamma * s * K + p * B + q * A,  K = W - A * U / n - B * V / n.
// So its gradients are
//   for gamma: s * K
//   for dy:    gamma * s * (u - U / n) + a * xh + q,  a = p - gamma * s * V / n
//   for xh:    h = a * dy + b * u,                    b = -gamma * s * B / n
// and, since xh depends on x like the output of a forward with gamma = 1, and s by -s^2 * xh / n,
//   for x:     s * (h - sum h / n - xh * (a * B + b * V + gamma * s * K) / n).
// Of the moving statistics, m and s are constants and L = gamma * s * W + p * B + q * A:
//   for gamma: s * W;  for dy: gamma * s * u + p * xh + q;  for x: s * p * dy.
template <typename T>
class SecondPass {
 public:
  using C = ParamType<T>;
  static constexpr int kSums = 6, kTerms = kSecondTerms;

  explicit SecondPass(const SecondArguments<T>& arguments)
      : a_(arguments), kernels_(SelectKernels<T>()), terms_(a_.view.channels, kTerms) {}

  bool reduces() const {
    const bool wanted =
        (a_.for_gamma.data != nullptr && a_.gamma != nullptr) || (a_.use_batch && applies());
    return wanted && a_.view.PerChannel() > 0;
  }
  bool applies() const { return a_.for_dy.data != nullptr || a_.for_x.data != nullptr; }
  void Start(int64_t) {}
  const double* centre() const { return a_.saved.mean; }
  const C* terms() const { return terms_.data(); }

  // A and B / s, U and V / s, U again and W.
  void Reduce(Layout layout, const Slab& slab, int64_t offset, const double* centre, double* sums,
              int64_t sums_stride) const {
    static const double zeros[kTileColumns] = {};
    const auto reduce = kernels_.backward_reduce[layout];
    const T *x = a_.x + offset, *dy = a_.dy + offset, *u = a_.ddx + offset;
    reduce(slab, {x, dy, nullptr}, centre, sums, sums_stride);
    reduce(slab, {x, u, nullptr}, centre, sums + 2 * sums_stride, sums_stride);
    reduce(slab, {dy, u, nullptr}, zeros, sums + 4 * sums_stride, sums_stride);
  }

  void Finish(int64_t c, const double* sums) {
    const bool fixed = a_.gamma == nullptr;
    const double s = a_.saved.inv_std[c];
    const double scale = fixed ? s : static_cast<double>(a_.gamma[c]) * s;
    const double p = fixed ? 0 : static_cast<double>(a_.ddgamma[c]);
    double k = sums != nullptr ? sums[5] : 0;
    // Of these, moving statistics have none.
    double dy_mean = 0, dy_xh = 0, u_mean = 0, u_xh = 0, slope = 0;
    if (a_.use_batch && sums != nullptr) {
      const double n = static_cast<double>(a_.view.PerChannel());
      dy_mean = sums[0] / n;
      dy_xh = sums[1] * s / n;
      u_mean = sums[2] / n;
      u_xh = sums[3] * s / n;
      k -= n * (dy_mean * u_mean + dy_xh * u_xh);
      slope = scale * k / n;
    }
    const double a = p - scale * u_xh, b = -scale * dy_xh;
    slope += a * dy_xh + b * u_xh;
    Put(a_.for_gamma, c, fixed ? 0 : s * k);
    terms_.Set(kXHigh, kXLow, c, a_.saved.mean[c]);
    terms_.Set(kDyHigh, kDyLow, c, dy_mean);
    terms_.Set(kUHigh, kULow, c, u_mean);
    terms_.Set(kUToDy, c, scale);
    terms_.Set(kCross, c, s * a);
    terms_.Set(kToDy, c, static_cast<double>(a_.ddbeta[c]));
    terms_.Set(kUToX, c, s * b);
    terms_.Set(kXToX, c, -s * s * slope);
  }

  void Apply(Layout layout, const Slab& slab, int64_t offset, const C* terms,
             int64_t terms_stride) const {
    if (layout == kOneChannel) {
      Apply(slab, offset, Terms<C, kOneChannel>{terms, terms_stride});
    } else {
      Apply(slab, offset, Terms<C, kColumns>{terms, terms_stride});
    }
  }

 private:
  static Result<T> At(const Result<T>& result, int64_t offset) {
    return {result.data == nullptr ? nullptr : result.data + offset, result.add};
  }

  template <Layout layout>
  void Apply(const Slab& slab, int64_t offset, const Terms<C, layout> terms) const {
    const T *x = a_.x + offset, *dy = a_.dy + offset, *u = a_.ddx + offset;
    Elementwise(slab, At(a_.for_dy, offset), [=](int64_t i, int64_t col) {
      return terms.Get(kUToDy, col) * terms.Centred(ToCompute(u[i]), kUHigh, col) +
             terms.Get(kCross, col) * terms.Centred(ToCompute(x[i]), kXHigh, col) +
             terms.Get(kToDy, col);
    });
    if (!a_.use_batch) {
      Elementwise(slab, At(a_.for_x, offset), [=](int64_t i, int64_t col) {
        return terms.Get(kCross, col) * ToCompute(dy[i]);
      });
      return;
    }
    Elementwise(slab, At(a_.for_x, offset), [=](int64_t i, int64_t col) {
      return terms.Get(kCross, col) * terms.Centred(ToCompute(dy[i]), kDyHigh, col) +
             terms.Get(kUToX, col) * terms.Centred(ToCompute(u[i]), kUHigh, col) +
             terms.Get(kXToX, col) * terms.Centred(ToCompute(x[i]), kXHigh, col);
    });
  }

  const SecondArguments<T>& a_;
  const Kernels<T>& kernels_;
  TermTable<C> terms_;
};

}  // namespace

template <typename T>
void SecondCpu(const SecondArguments<T>& arguments) {
  SecondPass<T> pass(arguments);
  Run(arguments.view, &pass);
}

template void SecondCpu(const SecondArguments<Half>&);
template void SecondCpu(const SecondArguments<float>&);
template void SecondCpu(const SecondArguments<double>&);

}  // namespace mxbn
