// From torch's tensors to plain arguments. Everything a kernel relies on to stay inside its memory is checked
// here, once, for every backend; the table lies in host memory so that this costs no synchronisation.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "arguments.h"

namespace shardgrad {

using Tensors = std::vector<torch::stable::Tensor>;

PackArguments check_pack(
    const Tensors& grads, const torch::stable::Tensor& slot, const torch::stable::Tensor& table,
    int64_t chunk_numel, double divisor, bool accumulate);

UnpackArguments check_unpack(
    const Tensors& chunks, const torch::stable::Tensor& unsharded, const torch::stable::Tensor& table);

SumArguments check_sum_chunks(
    const Tensors& chunks, const torch::stable::Tensor& out, double divisor, bool accumulate);

}  // namespace shardgrad
