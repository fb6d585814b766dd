// The CPU kernels of float8 blocks, on the calling thread.
#pragma once

#include "../float8.h"

namespace shardgrad::cpu {

// Makes the blocks [begin, end) of a message, and keeps what they lose.
void quantize_blocks(const QuantizeArguments& args, int64_t begin, int64_t end);

// Adds up the blocks [begin, end) of all messages, from left to right.
void sum_quantized_blocks(const SumQuantizedArguments& args, int64_t begin, int64_t end);

}  // namespace shardgrad::cpu
