// How the devices of this process, and the processes, tell each other about their parts of a batch.
//
// A layer, known by its key, has one meeting for its forwards and one for its backwards. Each of
// its devices comes to it with the summary of its part (see batch_norm.h) and leaves at once; when
// all have come, all are told the summary of the whole batch. Nobody waits on a thread of MXNet's,
// so that layers may overlap. Where several processes share the layer, what the devices of this one
// have together goes to the other processes first (see sync_exports.cc).
#ifndef MXBN_OPERATOR_SYNC_EXCHANGE_H_
#define MXBN_OPERATOR_SYNC_EXCHANGE_H_

#include <functional>
#include <string>
#include <vector>

#include "batch_norm_infer.h"

namespace mxbn {
namespace sync {

enum Direction { kForward, kBackward };

using Summary = std::vector<double>;

// The summary of the parts together. The order of the parts decides the bits.
Summary Merge(Direction direction, const std::vector<Summary>& parts);

// Told once, on any thread: the summary of the whole batch, or null and what went wrong.
using Done = std::function<void(const Summary* batch, const std::string& error)>;

// A device, such as "cpu(0)", comes with the summary of its part. It does not come again until
// `done` has been called.
void Arrive(const SyncParam& layer, Direction direction, const std::string& device, Summary part,
            Done done);

// Whether the layer is shared with other processes.
bool IsConnected(const std::string& key);

}  // namespace sync
}  // namespace mxbn

#endif  // MXBN_OPERATOR_SYNC_EXCHANGE_H_
