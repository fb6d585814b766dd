// The CUDA kernels of float8 blocks. Schemas are declared in shardgrad/ops/float8.py.
#include <torch/csrc/stable/library.h>

#include "../checks_float8.h"
#include "binding.h"

namespace shardgrad::cuda {
namespace {

using torch::stable::Tensor;

void quantize(
    const Tensor& values, const Tensor& kept, const Tensor& message, int64_t row_numel, int64_t row_nbytes,
    int64_t period, int64_t tail_offset) {
  launch(
      &shardgrad_cuda_quantize,
      check_quantize(values, kept, message, row_numel, row_nbytes, period, tail_offset), values);
}

void sum_quantized(const Tensors& messages, const Tensor& out, int64_t row_numel, int64_t row_nbytes) {
  launch(&shardgrad_cuda_sum_quantized, check_sum_quantized(messages, out, row_numel, row_nbytes), out);
}

}  // namespace
}  // namespace shardgrad::cuda

STABLE_TORCH_LIBRARY_IMPL(shardgrad, CUDA, library) {
  library.impl("quantize", TORCH_BOX(&shardgrad::cuda::quantize));
  library.impl("sum_quantized", TORCH_BOX(&shardgrad::cuda::sum_quantized));
}
