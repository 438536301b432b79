// What the passes on a CPU have per channel: terms for their loops over values, and results.
#ifndef MXBN_OPERATOR_BATCH_NORM_CPU_TERMS_H_
#define MXBN_OPERATOR_BATCH_NORM_CPU_TERMS_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "batch_norm.h"

namespace mxbn {

// A table of per-channel terms, as the loops over values take it.
template <typename C>
class TermTable {
 public:
  TermTable(int64_t channels, int terms)
      : channels_(channels), values_(static_cast<size_t>(channels * terms)) {}
  void Set(int term, int64_t channel, double value) {
    values_[term * channels_ + channel] = static_cast<C>(value);
  }
  // A value in two parts: what the type cannot hold of it goes to the second.
  void Set(int high, int low, int64_t channel, double value) {
    Set(high, channel, value);
    const double rest = value - static_cast<double>(values_[high * channels_ + channel]);
    Set(low, channel, std::isfinite(rest) ? rest : 0);
  }
  const C* data() const { return values_.data(); }

 private:
  int64_t channels_;
  std::vector<C> values_;
};

template <typename T>
void Put(const Result<T>& result, int64_t i, double value) {
  if (result.data == nullptr) return;
  if (result.add) value += static_cast<double>(result.data[i]);
  result.data[i] = static_cast<T>(value);
}

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_CPU_TERMS_H_
