// The side of the exchange that carries summaries to other processes, and back: one thread of
// mxbn/distributed.py, which calls these by way of sync_exports.cc.
#ifndef MXBN_OPERATOR_SYNC_PROCESSES_H_
#define MXBN_OPERATOR_SYNC_PROCESSES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "sync_exchange.h"

namespace mxbn {
namespace sync {

// What the devices of this process have together, on its way to the other processes.
struct Parcel {
  int64_t ticket;
  std::string key;
  Direction direction;
  Summary values;
};

// From now on the layer is shared with other processes.
void Connect(const std::string& key);

// Waits up to so many seconds for the next parcel; false if there is none.
bool Take(double seconds, Parcel* parcel);

// What all processes sent, in their order, or what went wrong.
void Answer(int64_t ticket, const std::vector<Summary>& parts, const std::string& error);

// Ends what the devices of a layer wait for, since one of them will not come.
void Abandon(const std::string& key, const std::string& reason);

}  // namespace sync
}  // namespace mxbn

#endif  // MXBN_OPERATOR_SYNC_PROCESSES_H_
