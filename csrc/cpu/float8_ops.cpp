// The CPU kernels of float8 blocks. Schemas are declared in shardgrad/ops/float8.py.
#include <torch/csrc/stable/library.h>

#include "../checks_float8.h"
#include "float8.h"
#include "parallel.h"

namespace shardgrad::cpu {
namespace {

using torch::stable::Tensor;

void quantize(
    const Tensor& values, const Tensor& kept, const Tensor& message, int64_t row_numel, int64_t row_nbytes,
    int64_t period, int64_t tail_offset) {
  const QuantizeArguments args =
      check_quantize(values, kept, message, row_numel, row_nbytes, period, tail_offset);
  parallel(args.blocks, args.blocks * kFloat8Block, [&](int64_t begin, int64_t end) {
    quantize_blocks(args, begin, end);
  });
}

void sum_quantized(const Tensors& messages, const Tensor& out, int64_t row_numel, int64_t row_nbytes) {
  const SumQuantizedArguments args = check_sum_quantized(messages, out, row_numel, row_nbytes);
  const int64_t work = args.blocks * kFloat8Block * static_cast<int64_t>(args.messages.size());
  parallel(args.blocks, work, [&](int64_t begin, int64_t end) { sum_quantized_blocks(args, begin, end); });
}

}  // namespace
}  // namespace shardgrad::cpu

STABLE_TORCH_LIBRARY_IMPL(shardgrad, CPU, library) {
  library.impl("quantize", TORCH_BOX(&shardgrad::cpu::quantize));
  library.impl("sum_quantized", TORCH_BOX(&shardgrad::cpu::sum_quantized));
}
