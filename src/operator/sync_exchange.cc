#include "sync_exchange.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "sync_processes.h"

namespace mxbn {
namespace sync {
namespace {

using Clock = std::chrono::steady_clock;

struct Arrival {
  Summary part;
  Done done;
};

// Devices that meet once, and what they then wait for.
struct Round {
  SyncParam layer;
  Direction direction;
  Clock::time_point deadline;
  std::map<std::string, Arrival> arrivals;  // by device: their order is fixed
};

using Meeting = std::pair<std::string, Direction>;

// Everything that is under way. It is never destroyed: the threads of MXNet outlive static objects.
struct State {
  std::mutex mutex;
  std::condition_variable deadlines;  // a round has begun to wait
  std::map<Meeting, Round> open;      // wait for devices
  std::map<Meeting, std::set<std::string>> seen;
  int64_t last_ticket = 0;
  std::map<int64_t, Round> away;  // wait for other processes, by ticket
  std::set<std::string> connected;
  std::condition_variable sent;
  std::deque<Parcel> outbox;
  pid_t watched = 0;  // the process that has a watching thread: a forked one does not
};
State& TheState() {
  static State& state = *new State;
  return state;
}

std::string Describe(const SyncParam& layer, Direction direction) {
  return "mxbn: SyncBatchNorm: layer '" + layer.key + "', " +
         (direction == kForward ? "forward: " : "backward: ");
}

void Fail(const Round& round, const std::string& reason) {
  const std::string message = Describe(round.layer, round.direction) + reason;
  for (const auto& arrival : round.arrivals) arrival.second.done(nullptr, message);
}

void Finish(const Round& round, const Summary& batch) {
  for (const auto& arrival : round.arrivals) arrival.second.done(&batch, "");
}

void After(Round* round) {
  const std::chrono::duration<double> timeout(round->layer.timeout);
  round->deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
}

std::string Listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Who came in time and who did not. A device that never came at all is not known by name.
std::string WhoIsMissing(const Round& round, const std::set<std::string>& seen) {
  std::vector<std::string> here, missing;
  for (const auto& arrival : round.arrivals) here.push_back(arrival.first);
  for (const std::string& device : seen) {
    if (round.arrivals.count(device) == 0) missing.push_back(device);
  }
  const size_t absent = static_cast<size_t>(round.layer.num_devices) - here.size();
  if (missing.size() != absent) missing = {std::to_string(absent) + " more"};
  std::ostringstream text;
  text << "within " << round.layer.timeout << " s only " << Listed(here) << " came, not "
       << Listed(missing) << ": expected num_devices=" << round.layer.num_devices
       << " devices, each of which runs the layer as often as the others";
  // All CPU contexts share MXNet's temporary spaces, and wait for each other there too.
  if (here[0].compare(0, 3, "cpu") == 0 && round.layer.num_devices > 1) {
    text << ", and MXNET_CPU_TEMP_COPY=1000 for CPU contexts (see the README)";
  }
  return text.str();
}

// Ends rounds whose time is over, for as long as the process lives.
void Watch() {
  State& state = TheState();
  std::unique_lock<std::mutex> lock(state.mutex);
  for (;;) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    std::vector<std::pair<Round, std::string>> over;
    for (auto it = state.open.begin(); it != state.open.end();) {
      if (it->second.deadline <= now) {
        const std::string reason = WhoIsMissing(it->second, state.seen[it->first]);
        over.emplace_back(std::move(it->second), reason);
        it = state.open.erase(it);
      } else {
        next = std::min(next, it++->second.deadline);
      }
    }
    for (auto it = state.away.begin(); it != state.away.end();) {
      if (it->second.deadline <= now) {
        std::ostringstream reason;
        reason << "within " << it->second.layer.timeout
               << " s no answer came from the other processes";
        over.emplace_back(std::move(it->second), reason.str());
        it = state.away.erase(it);
      } else {
        next = std::min(next, it++->second.deadline);
      }
    }
    if (!over.empty()) {
      lock.unlock();
      for (const auto& each : over) Fail(each.first, each.second);
      lock.lock();
    } else if (next == Clock::time_point::max()) {
      state.deadlines.wait(lock);
    } else {
      state.deadlines.wait_until(lock, next);
    }
  }
}

// To be called with the lock, when a round begins to wait.
void WatchOver(Round* round) {
  State& state = TheState();
  After(round);
  if (state.watched != getpid()) {
    state.watched = getpid();
    std::thread(Watch).detach();
  }
  state.deadlines.notify_all();
}

// What keeps the parts of a round from being merged; empty if nothing does.
std::string Problem(const Round& round) {
  const auto& first = *round.arrivals.begin();
  for (const auto& arrival : round.arrivals) {
    const size_t size = arrival.second.part.size(), expected = first.second.part.size();
    if (size == expected) continue;
    return arrival.first + " has " + std::to_string(size / 2 - 1) + " channels, expected " +
           std::to_string(expected / 2 - 1) + " as " + first.first + " has";
  }
  return "";
}

Summary MergeForward(const std::vector<Summary>& parts) {
  Summary batch = parts[0];
  const size_t channels = batch.size() / 2 - 1;
  double n = 0;
  for (const Summary& part : parts) n += part[2 * channels];
  batch[2 * channels] = n;
  const Summary* pivot = nullptr;  // the first part that is not empty
  for (const Summary& part : parts) {
    if (pivot == nullptr && part[2 * channels] > 0) pivot = &part;
  }
  if (pivot == nullptr) return batch;
  // Weights, not sums: one part that holds all values keeps its statistics bit by bit.
  for (size_t c = 0; c < channels; ++c) {
    double shift = 0, var = 0;
    for (const Summary& part : parts) {
      const double weight = part[2 * channels] / n;
      if (weight > 0) shift += weight * (part[c] - (*pivot)[c]);
    }
    const double mean = (*pivot)[c] + shift;
    for (const Summary& part : parts) {
      const double weight = part[2 * channels] / n, apart = part[c] - mean;
      if (weight > 0) var += weight * (part[channels + c] + apart * apart);
    }
    batch[c] = mean;
    batch[channels + c] = var;
  }
  return batch;
}

Summary MergeBackward(const std::vector<Summary>& parts) {
  Summary batch = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    for (size_t j = 0; j + 1 < batch.size(); ++j) batch[j] += parts[i][j];
  }
  return batch;
}

}  // namespace

Summary Merge(Direction direction, const std::vector<Summary>& parts) {
  if (parts.size() == 1) return parts[0];
  return direction == kForward ? MergeForward(parts) : MergeBackward(parts);
}

void Arrive(const SyncParam& layer, Direction direction, const std::string& device, Summary part,
            Done done) {
  State& state = TheState();
  const Meeting meeting(layer.key, direction);
  Round round;
  bool twice = false;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    Round& open = state.open[meeting];
    if (open.arrivals.empty()) {
      open.layer = layer;
      open.direction = direction;
      WatchOver(&open);
    }
    state.seen[meeting].insert(device);
    twice = open.arrivals.count(device) > 0;
    if (!twice) {
      open.arrivals[device] = {std::move(part), std::move(done)};
      if (open.arrivals.size() < static_cast<size_t>(layer.num_devices)) return;
      round = std::move(open);
      state.open.erase(meeting);
    }
  }
  if (twice) {
    return done(nullptr, Describe(layer, direction) + device +
                             " came twice before the others came once, expected the same "
                             "num_devices and timeout in every call with this key");
  }
  const std::string problem = Problem(round);
  if (!problem.empty()) return Fail(round, problem);
  std::vector<Summary> parts;
  for (const auto& arrival : round.arrivals) parts.push_back(arrival.second.part);
  const Summary merged = Merge(direction, parts);
  if (!IsConnected(layer.key)) return Finish(round, merged);
  std::lock_guard<std::mutex> lock(state.mutex);
  WatchOver(&round);
  const int64_t ticket = ++state.last_ticket;
  state.away.emplace(ticket, std::move(round));
  state.outbox.push_back({ticket, layer.key, direction, merged});
  state.sent.notify_one();
}

// --------------------------------------------------------------------------- for other processes

bool IsConnected(const std::string& key) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.connected.count(key) > 0;
}

void Connect(const std::string& key) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.connected.insert(key);
}

bool Take(double seconds, Parcel* parcel) {
  State& state = TheState();
  std::unique_lock<std::mutex> lock(state.mutex);
  const auto any = [&] { return !state.outbox.empty(); };
  if (!state.sent.wait_for(lock, std::chrono::duration<double>(seconds), any)) return false;
  *parcel = std::move(state.outbox.front());
  state.outbox.pop_front();
  return true;
}

void Answer(int64_t ticket, const std::vector<Summary>& parts, const std::string& error) {
  State& state = TheState();
  Round round;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto found = state.away.find(ticket);
    if (found == state.away.end()) return;  // its time is over
    round = std::move(found->second);
    state.away.erase(found);
  }
  if (!error.empty()) return Fail(round, error);
  Finish(round, Merge(round.direction, parts));
}

void Abandon(const std::string& key, const std::string& reason) {
  State& state = TheState();
  std::vector<Round> rounds;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    for (const Direction direction : {kForward, kBackward}) {
      const auto found = state.open.find({key, direction});
      if (found == state.open.end()) continue;
      rounds.push_back(std::move(found->second));
      state.open.erase(found);
    }
  }
  for (const Round& round : rounds) Fail(round, reason);
}

}  // namespace sync
}  // namespace mxbn
