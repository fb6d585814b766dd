// Sharing work out over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace shardgrad::cpu {

// Elements one thread should have before a second one is worth waking.
constexpr int64_t kGrain = 32768;

// Splits [0, count) over torch's threads when `work` elements in all are enough for more than one.
template <class Body>
void parallel(int64_t count, int64_t work, const Body& body) {
  if (work <= kGrain) {
    body(int64_t{0}, count);
  } else {
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, kGrain * count / work), body);
  }
}

}  // namespace shardgrad::cpu
