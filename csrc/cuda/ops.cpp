// The CUDA kernels' side of the dispatcher. Schemas are declared in shardgrad/ops/movement.py.
#include <torch/csrc/stable/library.h>

#include "../checks.h"
#include "binding.h"

namespace shardgrad::cuda {
namespace {

using torch::stable::Tensor;

void pack(
    const Tensors& grads, const Tensor& slot, const Tensor& table, int64_t chunk_numel,
    double divisor, bool accumulate) {
  launch(
      &shardgrad_cuda_pack, check_pack(grads, slot, table, chunk_numel, divisor, accumulate), slot);
}

void unpack(
    const Tensor& gathered, const Tensor& unsharded, const Tensor& table, int64_t chunk_numel) {
  launch(&shardgrad_cuda_unpack, check_unpack(gathered, unsharded, table, chunk_numel), unsharded);
}

void sum_chunks(const Tensors& chunks, const Tensor& out, double divisor, bool accumulate) {
  STD_TORCH_CHECK(
      chunks.size() <= shardgrad_cuda_max_summands, "sum_chunks takes at most ",
      shardgrad_cuda_max_summands, " chunks on CUDA, got ", chunks.size());
  launch(&shardgrad_cuda_sum_chunks, check_sum_chunks(chunks, out, divisor, accumulate), out);
}

}  // namespace
}  // namespace shardgrad::cuda

STABLE_TORCH_LIBRARY_IMPL(shardgrad, CUDA, library) {
  library.impl("pack", TORCH_BOX(&shardgrad::cuda::pack));
  library.impl("unpack", TORCH_BOX(&shardgrad::cuda::unpack));
  library.impl("sum_chunks", TORCH_BOX(&shardgrad::cuda::sum_chunks));
}
