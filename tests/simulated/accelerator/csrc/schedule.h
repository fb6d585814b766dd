// Which work a device was given, on which streams, and which waits lie between: a digest, and the
// launches.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "places.h"
#include "shadow.h"

namespace simulated {

// One launch, and what its stream knew when it happened.
struct Launched {
  Stamp stamp;
  Clock clock;
};

// Since the last restart. Streams count by the order in which they turn up, so two runs that differ
// only in which stream of the pool they were given have the same digest.
class Schedule {
 public:
  void restart(bool keep_launches) {
    digest_ = 14695981039346656037ull;
    names_.clear();
    launches_.clear();
    keeps_ = keep_launches;
  }

  void launched(const Stamp& stamp, const Clock& clock) {
    Seen& seen = name(stamp.lane, stamp.tick - 1);
    fold(1);
    fold(seen.number);
    for (char letter : text_of(stamp.site.op)) fold(static_cast<unsigned char>(letter));
    if (keeps_) launches_.push_back({stamp, clock});
  }

  // A wait, behind the work up to `now`, for the work up to `tick` of another stream.
  void waited(Lane lane, Tick now, Lane other, Tick tick) {
    uint64_t waiter = name(lane, now).number;
    Seen& seen = name(other, tick);
    fold(2);
    fold(waiter);
    fold(seen.number);
    fold(static_cast<uint64_t>(tick > seen.first ? tick - seen.first : 0));
  }

  uint64_t digest() const { return digest_; }
  const std::vector<Launched>& launches() const { return launches_; }

 private:
  struct Seen {
    uint64_t number;
    Tick first;  // its last work before it turned up
  };

  Seen& name(Lane lane, Tick now) {
    return names_.emplace(lane, Seen{names_.size(), now}).first->second;
  }

  void fold(uint64_t value) { digest_ = (digest_ ^ value) * 1099511628211ull; }

  uint64_t digest_ = 14695981039346656037ull;
  std::map<Lane, Seen> names_;
  std::vector<Launched> launches_;
  bool keeps_ = false;
};

}  // namespace simulated
