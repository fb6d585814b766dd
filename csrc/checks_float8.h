// From torch's tensors to plain arguments, for the ops on float8; as checks.h.
#pragma once

#include "checks.h"
#include "float8.h"

namespace shardgrad {

QuantizeArguments check_quantize(
    const torch::stable::Tensor& values, const torch::stable::Tensor& kept,
    const torch::stable::Tensor& message, int64_t row_numel, int64_t row_nbytes, int64_t period,
    int64_t tail_offset);

SumQuantizedArguments check_sum_quantized(
    const Tensors& messages, const torch::stable::Tensor& out, int64_t row_numel, int64_t row_nbytes);

}  // namespace shardgrad
