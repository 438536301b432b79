// What Python calls of the exchange between devices: see mxbn/_sync.py.
#include "sync_processes.h"

#define MXBN_EXPORT extern "C" __attribute__((visibility("default")))

// A parcel as Python sees it; its pointers hold until the thread's next mxbn_sync_take.
struct MxbnParcel {
  int64_t ticket;
  const char* key;
  int direction;
  const double* values;
  int64_t count;
};

MXBN_EXPORT void mxbn_sync_connect(const char* key) { mxbn::sync::Connect(key); }

MXBN_EXPORT void mxbn_sync_abandon(const char* key, const char* reason) {
  mxbn::sync::Abandon(key, reason);
}

MXBN_EXPORT int mxbn_sync_take(double seconds, MxbnParcel* result) {
  static thread_local mxbn::sync::Parcel parcel;
  if (!mxbn::sync::Take(seconds, &parcel)) return 0;
  *result = {parcel.ticket, parcel.key.c_str(), parcel.direction, parcel.values.data(),
             static_cast<int64_t>(parcel.values.size())};
  return 1;
}

// The values of all processes, one after the other; or error, if it is not null.
MXBN_EXPORT void mxbn_sync_answer(int64_t ticket, const double* values, int64_t count,
                                  int processes, const char* error) {
  std::vector<mxbn::sync::Summary> parts;
  for (int i = 0; i < processes; ++i)
    parts.emplace_back(values + i * count, values + (i + 1) * count);
  mxbn::sync::Answer(ticket, parts, error != nullptr ? error : "");
}
