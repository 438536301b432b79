// Runs every kernel, emulated, on tensors of every form, and compares the results with plain loops
// in double. It is built with sanitizers, which look at the kernels' accesses to memory; how exact
// the results are is tested elsewhere.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "batch_norm_gpu.h"
#include "cuda_driver.h"

// clang-format off: the emulation comes before what it emulates
#include "cuda_emulation.h"
#include "batch_norm_kernels.cuh"
// clang-format on

namespace mxbn {
namespace cuda {

Device::Device(int) {}

Device& Device::Get(int number) {
  static Device device(number);
  return device;
}

void Device::Launch(const std::string& kernel, unsigned grid_x, unsigned grid_y, unsigned threads,
                    void*, const void* argument) {
  const auto function =
      reinterpret_cast<void (*)(gpu::Arguments)>(dlsym(RTLD_DEFAULT, kernel.c_str()));
  if (function == nullptr) throw std::runtime_error("no kernel " + kernel);
  const auto& arguments = *static_cast<const gpu::Arguments*>(argument);
  cuda_emulation::Launch({grid_x, grid_y}, threads, [&] { function(arguments); });
}

}  // namespace cuda
}  // namespace mxbn

namespace {

using mxbn::View;

double ToDouble(mxbn::Half value) { return mxbn::HalfToFloat(value); }
double ToDouble(double value) { return value; }
void FromDouble(double value, mxbn::Half* to) { *to = mxbn::FloatToHalf(value); }
template <typename T>
void FromDouble(double value, T* to) {
  *to = static_cast<T>(value);
}

template <typename T>
struct TypeOf;
template <>
struct TypeOf<mxbn::Half> {
  static constexpr mxbn::gpu::DataType kType = mxbn::gpu::kFloat16;
  static constexpr double kTolerance = 4e-3;
};
template <>
struct TypeOf<float> {
  static constexpr mxbn::gpu::DataType kType = mxbn::gpu::kFloat32;
  static constexpr double kTolerance = 4e-6;
};
template <>
struct TypeOf<double> {
  static constexpr mxbn::gpu::DataType kType = mxbn::gpu::kFloat64;
  static constexpr double kTolerance = 1e-12;
};

struct Case {
  const char* name;
  View view;
  size_t offset;       // of the tensors, in values: not aligned for accesses of 16 bytes
  bool use_batch;      // and all results are written; else they are added
  bool fused = false;  // an addend and a ReLU
};

// Values in [-1, 1] that every type holds.
template <typename T>
std::vector<T> Draw(size_t count, size_t offset, unsigned seed) {
  std::vector<T> values(offset + count);
  for (size_t i = 0; i < count; ++i) {
    const unsigned random = (i + 1) * 2654435761u + seed * 40503u;
    FromDouble((static_cast<int>(random >> 20 & 255) - 128) / 128.0, &values[offset + i]);
  }
  return values;
}

template <typename T>
bool Differs(const char* what, size_t i, T got, double want, double size) {
  const double error = std::abs(ToDouble(got) - want);
  if (error <= TypeOf<T>::kTolerance * (1 + size)) return false;
  std::printf("%s[%zu] is %.9g, expected %.9g\n", what, i, ToDouble(got), want);
  return true;
}

template <typename T>
bool Run(const Case& the_case) {
  using P = mxbn::ParamType<T>;
  constexpr double kEps = 0.01, kMomentum = 0.75, kBefore = 0.5;
  const View& view = the_case.view;
  const size_t offset = the_case.offset, channels = view.channels;
  const bool batch = the_case.use_batch, add = !batch;
  const double before = add ? kBefore : 0;

  // Each in memory of its own size, so that accesses beyond it are found.
  const std::vector<T> x = Draw<T>(view.Size(), offset, 1), dy = Draw<T>(view.Size(), offset, 2);
  const std::vector<P> gamma = Draw<P>(channels, 0, 3), beta = Draw<P>(channels, 0, 4);
  const std::vector<P> old_mean = Draw<P>(channels, 0, 5), old_var(channels, 2);
  std::vector<P> moving_mean = old_mean, moving_var = old_var;
  T filling;
  FromDouble(kBefore, &filling);
  std::vector<T> y(x.size(), filling), dx = y, daddend = y;
  const std::vector<T> addend = Draw<T>(view.Size(), offset, 6);
  std::vector<P> mean(channels, kBefore), inv_std = mean, dgamma = mean, dbeta = mean;
  std::vector<double> saved(2 * channels + 1), terms(2 * channels);

  mxbn::gpu::Arguments a{};
  a.x = x.data() + offset;
  a.out = y.data() + offset;
  a.fused = the_case.fused ? addend.data() + offset : nullptr;
  a.relu = the_case.fused;
  a.gamma = gamma.data();
  a.beta = beta.data();
  a.moving_mean = moving_mean.data();
  a.moving_var = moving_var.data();
  a.eps = kEps;
  a.momentum = kMomentum;
  a.use_batch = a.step = batch;
  a.saved = saved.data();
  a.terms = terms.data();
  a.first = mean.data();
  a.second = inv_std.data();
  a.out_add = a.first_add = a.second_add = add;
  mxbn::gpu::MakePlan(view, TypeOf<T>::kType, &a);
  std::vector<double> parts(mxbn::gpu::PartsSize(a));
  a.parts = parts.data();
  mxbn::gpu::Forward(a, TypeOf<T>::kType, {0, nullptr});

  a.dy = dy.data() + offset;
  a.out = dx.data() + offset;
  a.fused = the_case.fused ? y.data() + offset : nullptr;
  a.daddend = the_case.fused ? daddend.data() + offset : nullptr;
  a.daddend_add = add;
  a.first = dgamma.data();
  a.second = dbeta.data();
  mxbn::gpu::MakePlan(view, TypeOf<T>::kType, &a);
  mxbn::gpu::Backward(a, TypeOf<T>::kType, {0, nullptr});

  // As the heads of the second derivatives serve x, gamma and beta.
  std::vector<T> for_dy(x.size(), filling), for_x = for_dy;
  std::vector<P> for_gamma(channels, kBefore);
  a.second_order = 1;
  a.ddx = x.data() + offset;
  a.ddgamma = gamma.data();
  a.ddbeta = beta.data();
  a.for_dy = for_dy.data() + offset;
  a.for_dy_add = add;
  a.out = for_x.data() + offset;
  a.first = for_gamma.data();
  mxbn::gpu::MakePlan(view, TypeOf<T>::kType, &a);
  parts.resize(mxbn::gpu::PartsSize(a));
  terms.resize(mxbn::gpu::TermsSize(a));
  a.parts = parts.data();
  a.terms = terms.data();
  mxbn::gpu::Second(a, TypeOf<T>::kType, {0, nullptr});

  const double n = view.PerChannel();
  for (size_t c = 0; c < channels; ++c) {
    const auto sum = [&](auto term) {
      double result = 0;
      for (int64_t o = 0; o < view.outer; ++o) {
        for (int64_t i = 0; i < view.inner; ++i) result += term(offset + view.Index(o, c, i));
      }
      return result;
    };
    const double batch_mean = sum([&](size_t i) { return ToDouble(x[i]); }) / n;
    const double batch_var =
        sum([&](size_t i) { return std::pow(ToDouble(x[i]) - batch_mean, 2); }) / n;
    const double m = batch ? batch_mean : old_mean[c], v = batch ? batch_var : old_var[c];
    const double scale = 1 / std::sqrt(v + kEps);
    const auto xh = [&](size_t i) { return (ToDouble(x[i]) - m) * scale; };
    const auto head = [&](size_t i) {
      return the_case.fused && ToDouble(y[i]) <= 0 ? 0 : ToDouble(dy[i]);
    };
    const double sum_dy = sum([&](size_t i) { return head(i); });
    const double sum_dy_xh = sum([&](size_t i) { return head(i) * xh(i); });
    const double steps = batch ? 1 - kMomentum : 0;
    if (Differs("mean", c, mean[c], before + m, 1) ||
        Differs("1/std", c, inv_std[c], before + scale, scale) ||
        Differs("moving mean", c, moving_mean[c], old_mean[c] + steps * (m - old_mean[c]), 1) ||
        Differs("moving variance", c, moving_var[c], old_var[c] + steps * (v - old_var[c]), 2) ||
        Differs("gradient of gamma", c, dgamma[c], before + sum_dy_xh, n) ||
        Differs("gradient of beta", c, dbeta[c], before + sum_dy, n)) {
      return false;
    }
    const double wrong = sum([&](size_t i) {
      const double slope = batch ? sum_dy / n + xh(i) * sum_dy_xh / n : 0;
      double out = xh(i) * gamma[c] + beta[c];
      if (the_case.fused) out = std::max(0.0, out + ToDouble(addend[i]));
      const double gradient = before + gamma[c] * scale * (head(i) - slope);
      return Differs("output", i, y[i], before + out, scale) ||
             Differs("gradient of data", i, dx[i], gradient, scale) ||
             (the_case.fused && Differs("gradient of addend", i, daddend[i], before + head(i), 0));
    });
    if (wrong > 0) return false;
    if (the_case.fused) continue;  // the second derivatives are given what a ReLU let through

    const double sum_x = sum([&](size_t i) { return ToDouble(x[i]); });
    const double sum_x_xh = sum([&](size_t i) { return ToDouble(x[i]) * xh(i); });
    const double corrections = batch ? (sum_dy * sum_x + sum_dy_xh * sum_x_xh) / n : 0;
    const double k = sum([&](size_t i) { return ToDouble(x[i]) * ToDouble(dy[i]); }) - corrections;
    const double along = batch ? gamma[c] * scale / n : 0;
    const double to_xh = gamma[c] - along * sum_x_xh, x_to_xh = -along * sum_dy_xh;
    const double slope = (to_xh * sum_dy_xh + x_to_xh * sum_x_xh) / n + along * k;
    if (Differs("gradient for gamma", c, for_gamma[c], before + scale * k, n)) return false;
    const double wrong_second = sum([&](size_t i) {
      const double x_rest = ToDouble(x[i]) - (batch ? sum_x / n : 0);
      const double dy_rest = ToDouble(dy[i]) - (batch ? sum_dy / n : 0);
      const double of_dy = before + gamma[c] * scale * x_rest + to_xh * xh(i) + beta[c];
      const double of_x =
          before + scale * (to_xh * dy_rest + x_to_xh * x_rest - (batch ? slope * xh(i) : 0));
      return Differs("gradient for dy", i, for_dy[i], of_dy, scale) ||
             Differs("gradient for data", i, for_x[i], of_x, scale * scale);
    });
    if (wrong_second > 0) return false;
  }
  return true;
}

}  // namespace

int main() {
  // The forms of a plan: rows and columns, of accesses of 16 bytes and of one value, one piece and
  // several, whole and partly used tiles and blocks.
  const Case cases[] = {
      {"rows", {3, 2, 64, 1}, 0, true},
      {"rows, moving statistics", {3, 2, 64, 1}, 0, false},
      {"rows of single values", {2, 2, 45, 1}, 0, true},
      {"rows, not aligned", {2, 2, 64, 1}, 1, true},
      {"rows in pieces", {5, 1, 4096, 1}, 0, true},
      {"columns", {70, 16, 1, 1}, 0, true},
      {"columns, moving statistics", {70, 16, 1, 1}, 0, false},
      {"columns of single values", {70, 5, 3, 1}, 0, true},
      {"columns, not aligned", {70, 16, 1, 1}, 1, true},
      {"columns in tiles", {3, 150, 2, 1}, 0, true},
      {"columns in pieces", {1500, 3, 4, 1}, 0, true},
      {"one value", {1, 1, 1, 1}, 0, true},
      {"fused, rows", {3, 2, 64, 1}, 0, true, true},
      {"fused, rows, not aligned, moving statistics", {2, 2, 64, 1}, 1, false, true},
      {"fused, columns in pieces", {1500, 3, 4, 1}, 0, true, true},
      {"fused, columns of single values, moving statistics", {70, 5, 3, 1}, 0, false, true},
  };
  try {
    for (const Case& each : cases) {
      if (!Run<mxbn::Half>(each) || !Run<float>(each) || !Run<double>(each)) {
        std::printf("wrong values: %s\n", each.name);
        return 1;
      }
    }
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
  std::puts("right values");
  return 0;
}
