// The CPU kernels on segments. Schemas are declared in shardgrad/ops/update.py and norm.py.
#include <torch/csrc/stable/library.h>

#include "../checks_segment.h"
#include "norm.h"
#include "parallel.h"
#include "update.h"

namespace shardgrad::cpu {
namespace {

using torch::stable::Tensor;

// What finding a row and preparing its update costs, in elements.
constexpr int64_t kRowWork = 64;

int64_t work_of(const Segment& segment) {
  int64_t numel = 0;
  for (int64_t i = 0; i < segment.row_count; ++i) numel += segment.rows[i].numel;
  return numel + kRowWork * segment.row_count;
}

template <class Body>
void update(const UpdateArguments& args, const Body& body) {
  if (args.found_inf != nullptr && *args.found_inf != 0) return;
  const Segment& segment = args.segment;
  parallel(
      segment.tiles, work_of(segment), [&](int64_t begin, int64_t end) { body(args, begin, end); });
  // All tiles of a row read the number of its last step, so it advances when the last of them is
  // done.
  for (int64_t i = 0; i < segment.row_count; ++i) {
    if (counts_step(segment, i)) args.steps[segment.rows[i].step_index] += 1;
  }
}

void adam(
    const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const MaybeTensor& master, const Tensor& steps, const Tensor& ticket, const Tensor& touched,
    const Tensor& rows, int64_t tiles, const Tensor& hyper, const MaybeTensor& scale,
    const MaybeTensor& found_inf, bool decoupled, bool maximize, bool stochastic_rounding,
    int64_t seed) {
  const UpdateArguments args = check_adam(
      param, grad, exp_avg, exp_avg_sq, master, steps, ticket, touched, rows, tiles, hyper, scale,
      found_inf, decoupled, maximize, stochastic_rounding, seed);
  check_rows(args);
  update(args, update_by_adam);
}

void sgd(
    const Tensor& param, const Tensor& grad, const MaybeTensor& momentum_buffer,
    const MaybeTensor& master, const Tensor& steps, const Tensor& ticket, const Tensor& touched,
    const Tensor& rows, int64_t tiles, const Tensor& hyper, const MaybeTensor& scale,
    const MaybeTensor& found_inf, bool nesterov, bool decoupled, bool maximize,
    bool stochastic_rounding, int64_t seed) {
  const UpdateArguments args = check_sgd(
      param, grad, momentum_buffer, master, steps, ticket, touched, rows, tiles, hyper, scale,
      found_inf, nesterov, decoupled, maximize, stochastic_rounding, seed);
  check_rows(args);
  update(args, update_by_sgd);
}

void norm(
    const Tensor& out, const Tensor& scratch, const Tensor& flat, const Tensor& touched,
    const Tensor& rows, int64_t tiles, double norm_type) {
  const NormArguments args = check_norm(out, scratch, flat, touched, rows, tiles, norm_type);
  check_rows(args);
  const int64_t workers = std::min(kNormWorkers, tiles);
  parallel(workers, work_of(args.segment), [&](int64_t begin, int64_t end) {
    accumulate_norm(args, begin, end);
  });
  finish_norm(args);
}

}  // namespace
}  // namespace shardgrad::cpu

STABLE_TORCH_LIBRARY_IMPL(shardgrad, CPU, library) {
  library.impl("adam_", TORCH_BOX(&shardgrad::cpu::adam));
  library.impl("sgd_", TORCH_BOX(&shardgrad::cpu::sgd));
  library.impl("norm_", TORCH_BOX(&shardgrad::cpu::norm));
}
