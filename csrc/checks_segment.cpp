#include "checks_segment.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>

#include "checks.h"

namespace shardgrad {
namespace {

using torch::stable::Tensor;

Array array_of(const Tensor& tensor, const Tensor& home, const char* name) {
  return {data_of(tensor, home, name), dtype_of(tensor, name), tensor.numel()};
}

ConstArray const_array_of(const Tensor& tensor, const Tensor& home, const char* name) {
  const Array array = array_of(tensor, home, name);
  return {array.data, array.dtype, array.numel};
}

// The data of a tensor of exactly this dtype; -1 elements allows any number of them.
void* data_as(
    const Tensor& tensor, const Tensor& home, int32_t dtype, int64_t numel, const char* name,
    const char* must_be) {
  STD_TORCH_CHECK(
      torch_dtype_of(tensor) == dtype && (numel < 0 || tensor.numel() == numel), name, " must be ",
      must_be);
  return data_of(tensor, home, name);
}

Segment segment_of(const Tensor& touched, const Tensor& rows, int64_t tiles, const Tensor& home) {
  STD_TORCH_CHECK(
      torch_dtype_of(rows) == aoti_torch_dtype_int64() && rows.dim() == 2 && rows.size(1) == 7,
      "rows must be int64 of shape [parameters, 7]");
  STD_TORCH_CHECK(tiles >= 0, "tiles must not be negative, got ", tiles);
  return {
      static_cast<const SegmentRow*>(data_of(rows, home, "rows")), rows.size(0), tiles,
      const_array_of(touched, home, "touched")};
}

Scale scale_of(const MaybeTensor& scale, const Tensor& home) {
  if (!scale.has_value()) return {nullptr, false};
  const bool is_double = torch_dtype_of(*scale) == aoti_torch_dtype_float64();
  const int32_t dtype = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  return {data_as(*scale, home, dtype, 1, "scale", "float32 or float64 with 1 element"), is_double};
}

void read_master(UpdateArguments& args, const MaybeTensor& master, const Tensor& home) {
  if (!master.has_value()) return;
  const int32_t dtype = torch_dtype_of(*master);
  const DType param = args.param.dtype;
  if (dtype == aoti_torch_dtype_float32() &&
      (param == DType::kBFloat16 || param == DType::kFloat16)) {
    args.master_kind = Master::kFloat32;
  } else if (dtype == aoti_torch_dtype_int16() && param == DType::kBFloat16) {
    args.master_kind = Master::kRemainder;
  } else {
    STD_TORCH_CHECK(
        false,
        "master must be float32 for a bfloat16 or float16 param, or int16 for a bfloat16 one");
  }
  args.master = data_of(*master, home, "master");
}

// What both rules take; `states` are in `args` already.
void read_common(
    UpdateArguments& args, const Tensor& param, const Tensor& grad, const MaybeTensor& master,
    const Tensor& steps, const Tensor& ticket, const Tensor& touched, const Tensor& rows,
    int64_t tiles, const Tensor& hyper, int64_t hyper_numel, const MaybeTensor& scale,
    const MaybeTensor& found_inf) {
  args.param = array_of(param, param, "param");
  args.grad = const_array_of(grad, param, "grad");
  args.segment = segment_of(touched, rows, tiles, param);
  args.steps = static_cast<float*>(
      data_as(steps, param, aoti_torch_dtype_float32(), -1, "steps", "float32"));
  args.steps_numel = steps.numel();
  args.ticket = static_cast<int32_t*>(
      data_as(ticket, param, aoti_torch_dtype_int32(), 1, "ticket", "int32 with 1 element"));
  args.hyper = static_cast<const double*>(data_as(
      hyper, param, aoti_torch_dtype_float64(), hyper_numel, "hyper",
      hyper_numel == 5 ? "float64 with 5 elements" : "float64 with 4 elements"));
  args.scale = scale_of(scale, param);
  if (found_inf.has_value()) {
    args.found_inf = static_cast<const float*>(data_as(
        *found_inf, param, aoti_torch_dtype_float32(), 1, "found_inf", "float32 with 1 element"));
  }
  read_master(args, master, param);
  int64_t state_numel = args.state_count > 0 ? args.states[0].numel : -1;
  for (int k = 1; k < args.state_count; ++k) {
    STD_TORCH_CHECK(
        args.states[k].numel == state_numel, "states and master must share one number of elements");
  }
  if (master.has_value()) {
    STD_TORCH_CHECK(
        state_numel < 0 || master->numel() == state_numel,
        "states and master must share one number of elements");
    state_numel = master->numel();
  }
  args.state_numel = state_numel;
}

struct Limits {
  int64_t param;
  int64_t grad;
  int64_t state;
  int64_t steps;
};
constexpr int64_t kNoLimit = -1;

bool is_within(int64_t offset, int64_t count, int64_t limit) {
  return limit == kNoLimit || (offset >= 0 && count <= limit - offset);
}

// Subtractions rather than sums: they cannot overflow.
void check_segment(const Segment& segment, const Limits& limits) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < segment.row_count; ++i) {
    const SegmentRow& row = segment.rows[i];
    const bool fits = row.numel >= 0 && is_within(row.param_offset, row.numel, limits.param) &&
        is_within(row.grad_offset, row.numel, limits.grad) &&
        is_within(row.state_offset, row.numel, limits.state) &&
        is_within(row.step_index, 1, limits.steps) &&
        is_within(row.flag_index, 1, segment.touched.numel);
    STD_TORCH_CHECK(
        fits && row.first_tile == tiles, "row ", i,
        " does not fit the tensors of its segment: param_offset ", row.param_offset,
        ", grad_offset ", row.grad_offset, ", state_offset ", row.state_offset, ", numel ",
        row.numel, ", step_index ", row.step_index, ", flag_index ", row.flag_index,
        ", first_tile ", row.first_tile);
    tiles += (row.numel + kTileNumel - 1) / kTileNumel;
  }
  STD_TORCH_CHECK(
      tiles == segment.tiles, "rows have ", tiles, " tiles, but tiles says ", segment.tiles);
}

}  // namespace

UpdateArguments check_adam(
    const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const MaybeTensor& master, const Tensor& steps, const Tensor& ticket, const Tensor& touched,
    const Tensor& rows, int64_t tiles, const Tensor& hyper, const MaybeTensor& scale,
    const MaybeTensor& found_inf, bool decoupled, bool maximize, bool stochastic_rounding,
    int64_t seed) {
  UpdateArguments args{};
  args.states[0] = array_of(exp_avg, param, "states");
  args.states[1] = array_of(exp_avg_sq, param, "states");
  args.state_count = 2;
  read_common(
      args, param, grad, master, steps, ticket, touched, rows, tiles, hyper, 5, scale, found_inf);
  args.decoupled = decoupled;
  args.maximize = maximize;
  args.stochastic = stochastic_rounding && args.can_round_stochastically();
  args.seed = static_cast<uint64_t>(seed);
  return args;
}

UpdateArguments check_sgd(
    const Tensor& param, const Tensor& grad, const MaybeTensor& momentum_buffer,
    const MaybeTensor& master, const Tensor& steps, const Tensor& ticket, const Tensor& touched,
    const Tensor& rows, int64_t tiles, const Tensor& hyper, const MaybeTensor& scale,
    const MaybeTensor& found_inf, bool nesterov, bool decoupled, bool maximize,
    bool stochastic_rounding, int64_t seed) {
  UpdateArguments args{};
  if (momentum_buffer.has_value()) {
    args.states[0] = array_of(*momentum_buffer, param, "states");
    args.state_count = 1;
  }
  read_common(
      args, param, grad, master, steps, ticket, touched, rows, tiles, hyper, 4, scale, found_inf);
  args.nesterov = nesterov;
  args.decoupled = decoupled;
  args.maximize = maximize;
  args.stochastic = stochastic_rounding && args.can_round_stochastically();
  args.seed = static_cast<uint64_t>(seed);
  return args;
}

NormArguments check_norm(
    const Tensor& out, const Tensor& scratch, const Tensor& flat, const Tensor& touched,
    const Tensor& rows, int64_t tiles, double norm_type) {
  NormArguments args{};
  const int32_t float64 = aoti_torch_dtype_float64();
  args.out = static_cast<double*>(data_as(out, out, float64, 2, "out", "float64 with 2 elements"));
  args.scratch = static_cast<double*>(
      data_as(scratch, out, float64, kNormScratchNumel, "scratch", "float64 with 2049 elements"));
  static_assert(kNormScratchNumel == 2049, "the message above has the number");
  STD_TORCH_CHECK(!std::isnan(norm_type), "norm_type must be a number, got NaN");
  args.flat = const_array_of(flat, out, "flat");
  args.segment = segment_of(touched, rows, tiles, out);
  args.norm_type = norm_type;
  return args;
}

void check_rows(const UpdateArguments& args) {
  check_segment(
      args.segment, {args.param.numel, args.grad.numel, args.state_numel, args.steps_numel});
}

void check_rows(const NormArguments& args) {
  check_segment(args.segment, {kNoLimit, args.flat.numel, kNoLimit, kNoLimit});
}

}  // namespace shardgrad
