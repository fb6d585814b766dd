#include "memory.h"

#include <cstdlib>
#include <new>

namespace simulated {

namespace {
constexpr size_t kGranule = 512;
}

Block* Memory::lend(size_t nbytes, int device, int64_t stream, Lane owner, int pool) {
  size_t rounded = (nbytes + kGranule - 1) / kGranule * kGranule;
  auto& free_blocks = pools_[{pool, device, stream, rounded}];
  Block* block = nullptr;
  MemoryStats& stats = stats_[device];
  if (!free_blocks.empty()) {
    block = free_blocks.back();  // the last one freed, as the most likely to show a missing wait
    free_blocks.pop_back();
  } else {
    void* memory = nullptr;
    if (posix_memalign(&memory, kGranule, rounded) != 0) throw std::bad_alloc();
    auto made = std::make_unique<Block>();
    made->base = reinterpret_cast<uintptr_t>(memory);
    made->nbytes = rounded;
    made->device = device;
    made->stream = stream;
    made->pool = pool;
    block = made.get();
    blocks_.emplace(made->base, std::move(made));
    stats.reserved += rounded;
  }
  block->owner = owner;
  block->live = true;
  block->generation++;
  block->recorded.clear();
  stats.live += rounded;
  stats.peak = std::max(stats.peak, stats.live);
  stats.allocations++;
  return block;
}

void Memory::give_back(Block* block, const Clock& recorded_until) {
  block->live = false;
  stats_[block->device].live -= block->nbytes;
  if (block->recorded.empty())
    pools_[key_of(*block)].push_back(block);
  else
    waiting_.push_back({block, recorded_until});
}

void Memory::take_back(int device, const Clock& host) {
  for (size_t i = 0; i < waiting_.size();) {
    Recorded& entry = waiting_[i];
    if (entry.block->device == device && host.covers(entry.until)) {
      pools_[key_of(*entry.block)].push_back(entry.block);
      waiting_[i] = std::move(waiting_.back());
      waiting_.pop_back();
    } else {
      ++i;
    }
  }
}

Block* Memory::find(uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second.get();
  return address < block->base + block->nbytes ? block : nullptr;
}

}  // namespace simulated
