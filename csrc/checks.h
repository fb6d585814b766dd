// From torch's tensors to plain arguments. Everything a kernel relies on to stay inside its memory
// is checked here, once, for every backend; the table of the movement ops lies in host memory so
// that this costs no synchronization.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "arguments.h"

namespace shardgrad {

// The code that torch has for the tensor's dtype.
int32_t torch_dtype_of(const torch::stable::Tensor& tensor);

// Refuses every dtype but the four.
DType dtype_of(const torch::stable::Tensor& tensor, const char* name);

// Returns the data of a contiguous tensor whose storage really holds it: the engine frees storages
// under living tensors, and a pointer into a freed one must not reach a kernel.
void* data_of(
    const torch::stable::Tensor& tensor, const torch::stable::Tensor& home, const char* name);

using Tensors = std::vector<torch::stable::Tensor>;

PackArguments check_pack(
    const Tensors& grads, const torch::stable::Tensor& slot, const torch::stable::Tensor& table,
    int64_t chunk_numel, double divisor, bool accumulate);

UnpackArguments check_unpack(
    const torch::stable::Tensor& gathered, const torch::stable::Tensor& unsharded,
    const torch::stable::Tensor& table, int64_t chunk_numel);

SumArguments check_sum_chunks(
    const Tensors& chunks, const torch::stable::Tensor& out, double divisor, bool accumulate);

}  // namespace shardgrad
