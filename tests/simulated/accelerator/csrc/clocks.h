// Vector clocks: what a stream knows about the progress of every other stream.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulated {

// A lane is one line of work that runs in order: a stream, or a stream of a graph under replay.
using Lane = int32_t;
// Ticks count the work given to one lane; the first is 1.
using Tick = int64_t;

class Clock {
 public:
  Tick at(Lane lane) const { return static_cast<size_t>(lane) < ticks_.size() ? ticks_[lane] : 0; }

  void set(Lane lane, Tick tick) {
    if (static_cast<size_t>(lane) >= ticks_.size()) ticks_.resize(lane + 1, 0);
    ticks_[lane] = tick;
  }

  void join(const Clock& other) {
    if (other.ticks_.size() > ticks_.size()) ticks_.resize(other.ticks_.size(), 0);
    for (size_t i = 0; i < other.ticks_.size(); ++i)
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

  const std::vector<Tick>& ticks() const { return ticks_; }

  bool knows(Lane lane, Tick tick) const { return at(lane) >= tick; }

  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.ticks_.size(); ++i)
      if (!knows(static_cast<Lane>(i), other.ticks_[i])) return false;
    return true;
  }

 private:
  std::vector<Tick> ticks_;
};

}  // namespace simulated
