// Optimizer updates on the CPU.
#pragma once

#include "../segment.h"

namespace shardgrad::cpu {

// Each updates what lies in the tiles [begin, end) of the live rows, on the calling thread, and
// leaves `steps` as it is.
void update_by_adam(const UpdateArguments& args, int64_t begin, int64_t end);
void update_by_sgd(const UpdateArguments& args, int64_t begin, int64_t end);

}  // namespace shardgrad::cpu
