// The layers of which guarded training counts what becomes of them: see mxbn/tools/guard.py.
#ifndef MXBN_OPERATOR_COUNTERS_H_
#define MXBN_OPERATOR_COUNTERS_H_

#include "counter.h"

namespace mxbn {

// The counters of the layer with these moving statistics, null if nobody counts.
long long* CountersOf(const void* moving_mean);

}  // namespace mxbn

#endif  // MXBN_OPERATOR_COUNTERS_H_
