#include "checks.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

namespace shardgrad {

using torch::stable::Tensor;

int32_t torch_dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// Asks the C shim directly: the C++ wrapper compares against every dtype torch knows, once per
// tensor per call.
DType dtype_of(const Tensor& tensor, const char* name) {
  const int32_t dtype = torch_dtype_of(tensor);
  if (dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (dtype == aoti_torch_dtype_float16()) return DType::kFloat16;
  STD_TORCH_CHECK(
      dtype == aoti_torch_dtype_float64(), name, " must be float32, bfloat16, float16 or float64");
  return DType::kFloat64;
}

namespace {

bool on_same_device(const Tensor& a, const Tensor& b) {
  int32_t type_a = 0;
  int32_t type_b = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &type_a));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &type_b));
  return type_a == type_b && a.get_device_index() == b.get_device_index();
}

}  // namespace

void* data_of(const Tensor& tensor, const Tensor& home, const char* name) {
  STD_TORCH_CHECK(
      on_same_device(tensor, home), name, " must be on the device of the tensor written to");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  int64_t storage_nbytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage_nbytes));
  const int64_t numel = tensor.numel();
  const int64_t end =
      (tensor.storage_offset() + numel) * static_cast<int64_t>(tensor.element_size());
  STD_TORCH_CHECK(
      numel == 0 || end <= storage_nbytes, name, " lies in a storage that was freed or shrunk");
  return tensor.data_ptr();
}

namespace {

struct Table {
  const Row* rows;
  int64_t count;
};

Table read_table(const Tensor& table) {
  STD_TORCH_CHECK(table.is_cpu(), "table must be on the CPU, whatever device the data is on");
  STD_TORCH_CHECK(
      torch_dtype_of(table) == aoti_torch_dtype_int64() && table.dim() == 2 && table.size(1) == 5,
      "table must be int64 of shape [parameters, 5]");
  return {static_cast<const Row*>(data_of(table, table, "table")), table.size(0)};
}

// Every piece must fit its reservation and the pieces of all ranks together must hold the whole
// parameter. Divisions rather than products: they cannot overflow.
void check_row(const Row& row, int64_t world_size, int64_t chunk_numel) {
  const bool non_negative =
      row.numel >= 0 && row.shard_numel >= 0 && row.shard_offset >= 0 && row.unsharded_offset >= 0;
  const bool fits = row.shard_numel <= row.span && row.span <= chunk_numel - row.shard_offset;
  const bool complete =
      row.numel == 0 || (row.shard_numel > 0 && (row.numel - 1) / row.shard_numel < world_size);
  STD_TORCH_CHECK(
      non_negative && fits && complete, "table does not fit ", world_size, " chunks of ",
      chunk_numel, " elements: numel ", row.numel, ", shard_numel ", row.shard_numel, ", span ",
      row.span, ", shard_offset ", row.shard_offset, ", unsharded_offset ", row.unsharded_offset);
}

int64_t count_chunks(const Tensor& whole, int64_t chunk_numel, const char* name) {
  const int64_t numel = whole.numel();
  const int64_t count = chunk_numel > 0 ? numel / chunk_numel : 0;
  STD_TORCH_CHECK(
      chunk_numel >= 0 && count * chunk_numel == numel, name, " has ", numel,
      " elements, not a multiple of chunk_numel ", chunk_numel);
  return count;
}

struct Chunks {
  std::vector<const void*> data;
  DType dtype;
  int64_t numel;
};

Chunks read_chunks(const Tensors& chunks, const Tensor& home) {
  STD_TORCH_CHECK(!chunks.empty(), "chunks must hold one tensor per rank, got none");
  Chunks result{{}, dtype_of(chunks[0], "chunks"), chunks[0].numel()};
  result.data.reserve(chunks.size());
  for (const Tensor& chunk : chunks) {
    STD_TORCH_CHECK(
        dtype_of(chunk, "chunks") == result.dtype && chunk.numel() == result.numel,
        "chunks must share one dtype and one number of elements");
    result.data.push_back(data_of(chunk, home, "chunks"));
  }
  return result;
}

}  // namespace

PackArguments check_pack(
    const Tensors& grads, const Tensor& slot, const Tensor& table, int64_t chunk_numel,
    double divisor, bool accumulate) {
  const Table rows = read_table(table);
  STD_TORCH_CHECK(
      static_cast<int64_t>(grads.size()) == rows.count, "table has ", rows.count, " rows for ",
      grads.size(), " gradients");
  const int64_t world_size = count_chunks(slot, chunk_numel, "slot");
  std::vector<Gradient> gradients;
  gradients.reserve(grads.size());
  for (int64_t i = 0; i < rows.count; ++i) {
    check_row(rows.rows[i], world_size, chunk_numel);
    const int64_t numel = grads[i].numel();
    STD_TORCH_CHECK(
        numel == rows.rows[i].numel || numel == 0, "gradient ", i, " has ", numel,
        " elements, the table says ", rows.rows[i].numel);
    const DType dtype = dtype_of(grads[i], "grads");
    gradients.push_back({numel == 0 ? nullptr : data_of(grads[i], slot, "grads"), dtype});
  }
  void* slot_data = data_of(slot, slot, "slot");
  return {std::move(gradients), rows.rows,   slot_data, dtype_of(slot, "slot"),
          world_size,           chunk_numel, divisor,   accumulate};
}

UnpackArguments check_unpack(
    const Tensor& gathered, const Tensor& unsharded, const Tensor& table, int64_t chunk_numel) {
  const Table rows = read_table(table);
  const int64_t world_size = count_chunks(gathered, chunk_numel, "gathered");
  const int64_t unsharded_numel = unsharded.numel();
  for (int64_t i = 0; i < rows.count; ++i) {
    const Row& row = rows.rows[i];
    check_row(row, world_size, chunk_numel);
    STD_TORCH_CHECK(
        row.numel <= unsharded_numel - row.unsharded_offset, "parameter ", i, " ends behind the ",
        unsharded_numel, " elements of the unsharded buffer");
  }
  const void* gathered_data = data_of(gathered, unsharded, "gathered");
  void* unsharded_data = data_of(unsharded, unsharded, "unsharded");
  return {gathered_data,  dtype_of(gathered, "gathered"),
          world_size,     chunk_numel,
          rows.rows,      rows.count,
          unsharded_data, dtype_of(unsharded, "unsharded")};
}

SumArguments check_sum_chunks(
    const Tensors& chunks, const Tensor& out, double divisor, bool accumulate) {
  Chunks read = read_chunks(chunks, out);
  STD_TORCH_CHECK(
      out.numel() == read.numel, "out has ", out.numel(), " elements, the chunks have ",
      read.numel);
  void* out_data = data_of(out, out, "out");
  return {std::move(read.data), read.dtype, out_data,  dtype_of(out, "out"),
          read.numel,           divisor,    accumulate};
}

}  // namespace shardgrad
