#include "checks_float8.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

namespace shardgrad {

using torch::stable::Tensor;

namespace {

void check_bytes(const Tensor& tensor) {
  STD_TORCH_CHECK(
      torch_dtype_of(tensor) == aoti_torch_dtype_uint8(), "messages, and what is kept, must be uint8");
}

// Returns the blocks of the values, once their rows are known to fit.
int64_t check_rows_of(const Tensor& values, int64_t row_numel, int64_t row_nbytes) {
  STD_TORCH_CHECK(torch_dtype_of(values) == aoti_torch_dtype_float32(), "values must be float32");
  STD_TORCH_CHECK(
      row_numel > 0 && row_numel % kFloat8Block == 0 && values.numel() % kFloat8Block == 0,
      "values and rows must be multiples of ", kFloat8Block);
  STD_TORCH_CHECK(
      row_nbytes >= row_numel && row_nbytes - row_numel >= row_numel / kFloat8Block, "a row of ", row_nbytes,
      " bytes has no room for ", row_numel, " values");
  return values.numel() / kFloat8Block;
}

// Divisions rather than products: they cannot overflow.
void check_room(const Tensor& message, int64_t numel, int64_t row_numel, int64_t row_nbytes) {
  const int64_t rows = numel / row_numel + (numel % row_numel != 0 ? 1 : 0);
  STD_TORCH_CHECK(
      rows == 0 || message.numel() / rows >= row_nbytes, "a message of ", message.numel(),
      " bytes has no room for ", numel, " values");
}

}  // namespace

QuantizeArguments check_quantize(
    const Tensor& values, const Tensor& kept, const Tensor& message, int64_t row_numel, int64_t row_nbytes,
    int64_t period, int64_t tail_offset) {
  const int64_t blocks = check_rows_of(values, row_numel, row_nbytes);
  check_bytes(kept);
  check_bytes(message);
  check_room(message, values.numel(), row_numel, row_nbytes);
  STD_TORCH_CHECK(
      period > 0 && period % kFloat8Block == 0 && tail_offset % kFloat8Block == 0 && tail_offset >= 0 &&
          tail_offset <= period,
      "a tail at ", tail_offset, " of ", period, " values");
  STD_TORCH_CHECK(
      kept.numel() == values.numel() + blocks, kept.numel(), " bytes are not what is kept of ",
      values.numel(), " values");
  return {static_cast<const float*>(data_of(values, values, "values")),
          static_cast<uint8_t*>(data_of(kept, values, "what is kept")),
          static_cast<uint8_t*>(data_of(message, values, "messages")),
          blocks,
          row_numel / kFloat8Block,
          row_nbytes,
          period / kFloat8Block,
          tail_offset / kFloat8Block};
}

SumQuantizedArguments check_sum_quantized(
    const Tensors& messages, const Tensor& out, int64_t row_numel, int64_t row_nbytes) {
  STD_TORCH_CHECK(!messages.empty(), "there is nothing to read from");
  const int64_t blocks = check_rows_of(out, row_numel, row_nbytes);
  std::vector<const uint8_t*> data;
  data.reserve(messages.size());
  for (const Tensor& message : messages) {
    check_bytes(message);
    check_room(message, out.numel(), row_numel, row_nbytes);
    data.push_back(static_cast<const uint8_t*>(data_of(message, out, "messages")));
  }
  return {std::move(data), static_cast<float*>(data_of(out, out, "out")), blocks, row_numel / kFloat8Block,
          row_nbytes};
}

}  // namespace shardgrad
