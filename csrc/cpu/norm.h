// The norm of a segment's gradients on the CPU.
#pragma once

#include "../segment.h"

namespace shardgrad::cpu {

// Lets the workers [begin, end) go through their tiles and leave what they found in the scratch, on
// the calling thread.
void accumulate_norm(const NormArguments& args, int64_t begin, int64_t end);

// Adds what all workers found, in order.
void finish_norm(const NormArguments& args);

}  // namespace shardgrad::cpu
