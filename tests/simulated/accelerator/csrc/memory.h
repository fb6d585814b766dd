// Blocks of memory, and the order in which they are lent again: as a stream-ordered caching
// allocator does it.
//
// A block belongs to the stream it was allocated on. Freed, it goes to the pool of that stream at
// once, since the stream's later work comes after its earlier work anyway. If it was recorded on
// other streams, it waits until the host knows that these are done.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "shadow.h"

namespace simulated {

struct Block {
  uintptr_t base = 0;
  size_t nbytes = 0;  // as lent, a multiple of 512
  int device = 0;
  int64_t stream = 0;  // the stream it was allocated on
  Lane owner = 0;      // the same, as a lane: of a graph if it was allocated during a capture
  int pool = 0;        // 0, or the number of the graph that owns it
  bool live = false;
  uint32_t generation = 0;  // counts how often it was lent
  std::set<Lane> recorded;
  Stamp freed;
  Shadow shadow;
};

struct MemoryStats {
  size_t live = 0;
  size_t peak = 0;
  size_t reserved = 0;
  size_t allocations = 0;
};

class Memory {
 public:
  // Lends a block of the pool, an old one if one has the right size.
  Block* lend(size_t nbytes, int device, int64_t stream, Lane owner, int pool);

  // Takes a block back; one that was recorded on other streams stays out of its pool until
  // `take_back`.
  void give_back(Block* block, const Clock& recorded_until);

  // Returns recorded blocks to their pools if `host` knows that their last use is over.
  void take_back(int device, const Clock& host);

  // Gives the device's free blocks back to the system, except those of graphs; anybody may have
  // them next.
  void empty(int device);

  // Returns the block that holds an address, lent or not, or nullptr.
  Block* find(uintptr_t address);

  MemoryStats& stats(int device) { return stats_[device]; }

 private:
  using PoolKey = std::tuple<int, int, int64_t, size_t>;  // graph, device, stream, bytes
  struct Recorded {
    Block* block;
    Clock until;
  };

  // Returns a block that nobody has: one that was given back, or a new one.
  Block* reserve(size_t rounded, int device);

  static PoolKey key_of(const Block& block) {
    return {block.pool, block.device, block.stream, block.nbytes};
  }

  std::map<uintptr_t, std::unique_ptr<Block>> blocks_;
  std::map<PoolKey, std::deque<Block*>> pools_;
  std::map<std::pair<int, size_t>, std::deque<Block*>> returned_;  // by device and bytes
  std::vector<Recorded> waiting_;
  std::map<int, MemoryStats> stats_;
};

}  // namespace simulated
