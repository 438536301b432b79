#include "batch_norm_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "batch_norm_cpu_kernels.h"
#include "batch_norm_cpu_schedule.h"
#include "batch_norm_cpu_terms.h"

namespace mxbn {
namespace {

// The constant of eps=0 on a channel without spread is y = beta: its 1/sqrt(0) counts as 0.
double InverseStd(double var, double eps) {
  const double d = var + eps;
  if (d == 0) return 0;
  return d > 0 ? 1 / std::sqrt(d) : std::numeric_limits<double>::quiet_NaN();
}

// A pointer moved on, if there is one.
template <typename T>
const T* At(const T* tensor, int64_t offset) {
  return tensor != nullptr ? tensor + offset : nullptr;
}

// Large tensors are out of the caches before anyone reads them; written past the caches, they need
// not be read first. That wins earlier where channel by channel is written than in the order of
// memory.
template <typename T>
Write HowToWrite(const Result<T>& result, const View& view, bool by_channel) {
  const int64_t least_streamed = int64_t{by_channel ? 32 : 64} << 20;
  if (result.add) return Write::kAdd;
  const int64_t bytes = view.Size() * static_cast<int64_t>(sizeof(T));
  return bytes >= least_streamed ? Write::kStream : Write::kStore;
}

template <typename T>
class ForwardPass {
 public:
  using C = ParamType<T>;
  static constexpr int kSums = 2, kTerms = kForwardTerms;

  explicit ForwardPass(const ForwardArguments<T>& arguments)
      : a_(arguments),
        kernels_(SelectKernels<T>()),
        centre_(static_cast<size_t>(a_.view.channels)),
        terms_(a_.view.channels, kTerms) {}

  bool reduces() const {
    return (a_.use_batch || a_.step) && a_.batch == nullptr && a_.view.PerChannel() > 0;
  }
  bool applies() const { return a_.y.data != nullptr; }
  const double* centre() const { return centre_.data(); }
  const C* terms() const { return terms_.data(); }

  // Chooses the pivot of a channel. Sums in double around it are exact enough in a single sweep, if
  // it lies within some standard deviations of the mean. The mean of the first values does (and
  // even an outlier among n values is only sqrt(n) of them away); if all are equal, it is that
  // value.
  void Start(int64_t c) {
    const View& view = a_.view;
    const int64_t count = std::min<int64_t>(view.PerChannel(), 8);
    const double first = Value(0, c, 0);
    double shift = 0;
    for (int64_t o = 0, i = 0, value = 0; value < count; ++value) {
      shift += Value(o, c, i) - first;
      if (++i == view.inner) ++o, i = 0;
    }
    centre_[c] = first + shift / static_cast<double>(count);
  }

  void Reduce(Layout layout, const Slab& slab, int64_t offset, const double* centre, double* sums,
              int64_t sums_stride) const {
    kernels_.statistics[layout](slab, a_.x + offset, centre, sums, sums_stride);
  }

  // sums: of x - pivot and of its square; null where x gives no statistics.
  void Finish(int64_t c, const double* sums) {
    double batch_mean = 0, batch_var = 0;
    const bool of_batch = BatchStatistics(c, sums, &batch_mean, &batch_var);
    if (a_.part != nullptr) {
      a_.part[c] = batch_mean;
      a_.part[a_.view.channels + c] = batch_var;
      return;
    }
    // Read before anything is stepped: one array may serve twice.
    const double gamma = a_.gamma != nullptr ? static_cast<double>(a_.gamma[c]) : 1;
    const double beta = static_cast<double>(a_.beta[c]);
    double mean = static_cast<double>(a_.moving_mean[c]);
    double var = static_cast<double>(a_.moving_var[c]);
    if (of_batch && a_.step) Step(c, batch_mean, batch_var);
    if (of_batch && a_.use_batch) {
      mean = batch_mean;
      var = batch_var;
    }
    const double inv_std = InverseStd(var, a_.eps);
    a_.saved.mean[c] = mean;
    a_.saved.inv_std[c] = inv_std;
    terms_.Set(kMeanHigh, kMeanLow, c, mean);
    terms_.Set(kScale, c, gamma * inv_std);
    terms_.Set(kOffset, c, beta);
  }

  void Apply(Layout layout, const Slab& slab, int64_t offset, const C* terms,
             int64_t terms_stride) const {
    const ForwardInputs<T> in{a_.x + offset, At(a_.addend, offset), a_.relu};
    kernels_.forward[layout](slab, in, terms, terms_stride, a_.y.data + offset,
                             HowToWrite(a_.y, a_.view, reduces()));
  }

 private:
  double Value(int64_t o, int64_t c, int64_t i) const {
    return static_cast<double>(kernels_.to_compute(a_.x[a_.view.Index(o, c, i)]));
  }

  // The statistics of the batch, from x or from what others found; false where there are none.
  bool BatchStatistics(int64_t c, const double* sums, double* mean, double* var) const {
    const int64_t channels = a_.view.channels;
    if (sums != nullptr) {
      const double n = static_cast<double>(a_.view.PerChannel());
      const double shift = sums[0] / n;
      *mean = centre_[c] + shift;
      *var = sums[1] / n - shift * shift;
      if (*var < 0) *var = 0;  // by rounding only
      return true;
    }
    const bool wanted = a_.use_batch || a_.step;
    if (!wanted || a_.batch == nullptr || a_.batch[2 * channels] == 0) return false;
    *mean = a_.batch[c];
    *var = a_.batch[channels + c];
    return true;
  }

  // moving = momentum * moving + (1 - momentum) * batch, unless the batch is not finite (also as
  // the stored type sees it).
  void Step(int64_t c, double mean, double var) {
    if (!std::isfinite(static_cast<C>(mean)) || !std::isfinite(static_cast<C>(var))) {
      if (a_.skipped != nullptr) ++*a_.skipped;
      return;
    }
    const double old = a_.momentum, fresh = 1 - a_.momentum;
    a_.moving_mean[c] = static_cast<C>(old * static_cast<double>(a_.moving_mean[c]) + fresh * mean);
    a_.moving_var[c] = static_cast<C>(old * static_cast<double>(a_.moving_var[c]) + fresh * var);
  }

  const ForwardArguments<T>& a_;
  const Kernels<T>& kernels_;
  std::vector<double> centre_;
  TermTable<C> terms_;
};

// With xh = (x - m) * inv_std and n values per channel:
//   dbeta = sum dy, dgamma = sum dy * xh
//   batch statistics:  dx = gamma * inv_std * (dy - dbeta / n - xh * dgamma / n)
//   moving statistics: dx = gamma * inv_std * dy
// Where a ReLU follows, what it lets through takes the place of dy, and is daddend.
template <typename T>
class BackwardPass {
 public:
  using C = ParamType<T>;
  static constexpr int kSums = 2, kTerms = kBackwardTerms;

  explicit BackwardPass(const BackwardArguments<T>& arguments)
      : a_(arguments), kernels_(SelectKernels<T>()), terms_(a_.view.channels, kTerms) {}

  bool reduces() const {
    const bool wanted = (a_.dgamma.data != nullptr && a_.gamma != nullptr) ||
                        a_.dbeta.data != nullptr ||
                        (a_.use_batch && (a_.dx.data != nullptr || a_.part != nullptr));
    return wanted && a_.batch == nullptr && a_.view.PerChannel() > 0;
  }
  bool applies() const { return a_.dx.data != nullptr || a_.daddend.data != nullptr; }
  void Start(int64_t) {}
  const double* centre() const { return a_.saved.mean; }
  const C* terms() const { return terms_.data(); }

  void Reduce(Layout layout, const Slab& slab, int64_t offset, const double* centre, double* sums,
              int64_t sums_stride) const {
    const BackwardInputs<T> in{a_.x + offset, a_.dy + offset, At(a_.y, offset)};
    kernels_.backward_reduce[layout](slab, in, centre, sums, sums_stride);
  }

  // sums: of dy and of dy * (x - m); null where nothing is to be summed.
  void Finish(int64_t c, const double* sums) {
    const int64_t channels = a_.view.channels;
    const double* const batch = a_.batch;
    const double first = sums != nullptr ? sums[0] : batch != nullptr ? batch[c] : 0;
    const double second = sums != nullptr ? sums[1] : batch != nullptr ? batch[channels + c] : 0;
    if (a_.part != nullptr) {
      a_.part[c] = first;
      a_.part[channels + c] = second;
    }
    const double inv_std = a_.saved.inv_std[c];
    const double dbeta = first, dgamma = second * inv_std;
    Put(a_.dbeta, c, dbeta);
    Put(a_.dgamma, c, a_.gamma != nullptr ? dgamma : 0);
    const double gamma = a_.gamma != nullptr ? static_cast<double>(a_.gamma[c]) : 1;
    const double n =
        batch != nullptr ? batch[2 * channels] : static_cast<double>(a_.view.PerChannel());
    terms_.Set(kMeanHigh, kMeanLow, c, a_.saved.mean[c]);
    terms_.Set(kScale, c, gamma * inv_std);
    terms_.Set(kSlope, c, inv_std * dgamma / n);
    terms_.Set(kShiftHigh, kShiftLow, c, dbeta / n);
  }

  void Apply(Layout layout, const Slab& slab, int64_t offset, const C* terms,
             int64_t terms_stride) const {
    const T* x = a_.use_batch ? a_.x + offset : nullptr;
    const BackwardInputs<T> in{x, a_.dy + offset, At(a_.y, offset)};
    if (a_.daddend.data != nullptr) {  // before dx, which may be dy
      kernels_.mask[layout](slab, in, a_.daddend.data + offset,
                            HowToWrite(a_.daddend, a_.view, reduces()));
    }
    if (a_.dx.data != nullptr) {
      kernels_.backward[layout](slab, in, terms, terms_stride, a_.dx.data + offset,
                                HowToWrite(a_.dx, a_.view, reduces()));
    }
  }

 private:
  const BackwardArguments<T>& a_;
  const Kernels<T>& kernels_;
  TermTable<C> terms_;
};

}  // namespace

template <typename T>
void ForwardCpu(const ForwardArguments<T>& arguments) {
  ForwardPass<T> pass(arguments);
  Run(arguments.view, &pass);
}

template <typename T>
void BackwardCpu(const BackwardArguments<T>& arguments) {
  BackwardPass<T> pass(arguments);
  Run(arguments.view, &pass);
}

template void ForwardCpu(const ForwardArguments<Half>&);
template void ForwardCpu(const ForwardArguments<float>&);
template void ForwardCpu(const ForwardArguments<double>&);
template void BackwardCpu(const BackwardArguments<Half>&);
template void BackwardCpu(const BackwardArguments<float>&);
template void BackwardCpu(const BackwardArguments<double>&);

}  // namespace mxbn
