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
    block = reserve(rounded, device);
    block->stream = stream;
    block->pool = pool;
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

Block* Memory::reserve(size_t rounded, int device) {
  auto& returned = returned_[{device, rounded}];
  if (!returned.empty()) {
    Block* block = returned.back();
    returned.pop_back();
    return block;
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, kGranule, rounded) != 0) throw std::bad_alloc();
  auto made = std::make_unique<Block>();
  made->base = reinterpret_cast<uintptr_t>(memory);
  made->nbytes = rounded;
  made->device = device;
  Block* block = made.get();
  blocks_.emplace(block->base, std::move(made));
  return block;
}

void Memory::empty(int device) {
  for (auto& [key, free_blocks] : pools_) {
    if (std::get<0>(key) != 0 || std::get<1>(key) != device) continue;
    for (Block* block : free_blocks) {
      block->shadow = Shadow();
      stats_[device].reserved -= block->nbytes;
      returned_[{device, block->nbytes}].push_back(block);
    }
    free_blocks.clear();
  }
}

void Memory::give_back(Block* block, const Clock& recorded_until) {
  block->live = false;
  stats_[block->device].live -= block->nbytes;
  if (block->recorded.empty()) pools_[key_of(*block)].push_back(block);
  else waiting_.push_back({block, recorded_until});
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
