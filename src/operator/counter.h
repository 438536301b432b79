// What guarded training counts for a layer, in an array on the layer's device. The device code
// reads this file too, so it includes nothing.
#ifndef MXBN_OPERATOR_COUNTER_H_
#define MXBN_OPERATOR_COUNTER_H_

namespace mxbn {

enum Counter {
  kBatchForwards,    // forwards that used the statistics of the batch
  kMovingForwards,   // forwards that used the moving ones
  kStepForwards,     // forwards that stepped the moving statistics
  kSkippedChannels,  // steps of a channel that were not taken, since it was not finite
  kCounters
};

}  // namespace mxbn

#endif  // MXBN_OPERATOR_COUNTER_H_
