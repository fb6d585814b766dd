// The last accesses to every byte of one block of memory, and what is not ordered after them.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "clocks.h"

namespace simulated {

// What did something (an interned name) and where in the program (an interned place).
struct Site {
  int32_t op = 0;
  int32_t place = 0;
  bool operator==(const Site& other) const { return op == other.op && place == other.place; }
};

struct Stamp {
  Lane lane = 0;
  Tick tick = 0;
  Site site;
};

enum class HazardKind {
  ReadAfterWrite,
  WriteAfterRead,
  WriteAfterWrite,
  FreeInFlight,
  UseAfterFree
};

// Called with an earlier access that the present one is not ordered after, and the bytes they
// share.
using OnConflict = std::function<void(HazardKind, const Stamp&, size_t begin, size_t end)>;

class Shadow {
 public:
  // Checks an access to bytes [begin, end) of a lane that knows `known`, and remembers it.
  void touch(
      size_t begin, size_t end, bool writes, const Stamp& now, const Clock& known,
      const OnConflict&);

  // Calls `on_conflict` for every remembered access that `known` does not cover.
  void unordered(const Clock& known, const OnConflict& on_conflict) const;

 private:
  struct Cell {
    size_t end;
    bool written = false;
    Stamp write;
    std::vector<Stamp> reads;  // since the write; the latest of each lane, since a lane is in order
  };

  void split(size_t at);
  void cover(size_t begin, size_t end);
  static void remember_read(Cell& cell, const Stamp& now);

  std::map<size_t, Cell> cells_;  // by first byte; they do not overlap
};

}  // namespace simulated
