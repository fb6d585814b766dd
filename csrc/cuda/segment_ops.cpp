// The CUDA kernels on segments and the dispatcher. Schemas are declared in shardgrad/ops/update.py
// and norm.py.
#include <torch/csrc/stable/library.h>

#include "../checks_segment.h"
#include "binding.h"

namespace shardgrad::cuda {
namespace {

using torch::stable::Tensor;

void adam(
    const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const MaybeTensor& master, const Tensor& steps, const Tensor& ticket, const Tensor& touched,
    const Tensor& rows, int64_t tiles, const Tensor& hyper, const MaybeTensor& scale,
    const MaybeTensor& found_inf, bool decoupled, bool maximize, bool stochastic_rounding,
    int64_t seed) {
  launch(
      &shardgrad_cuda_adam,
      check_adam(
          param, grad, exp_avg, exp_avg_sq, master, steps, ticket, touched, rows, tiles, hyper,
          scale, found_inf, decoupled, maximize, stochastic_rounding, seed),
      param);
}

void sgd(
    const Tensor& param, const Tensor& grad, const MaybeTensor& momentum_buffer,
    const MaybeTensor& master, const Tensor& steps, const Tensor& ticket, const Tensor& touched,
    const Tensor& rows, int64_t tiles, const Tensor& hyper, const MaybeTensor& scale,
    const MaybeTensor& found_inf, bool nesterov, bool decoupled, bool maximize,
    bool stochastic_rounding, int64_t seed) {
  launch(
      &shardgrad_cuda_sgd,
      check_sgd(
          param, grad, momentum_buffer, master, steps, ticket, touched, rows, tiles, hyper, scale,
          found_inf, nesterov, decoupled, maximize, stochastic_rounding, seed),
      param);
}

void norm(
    const Tensor& out, const Tensor& scratch, const Tensor& flat, const Tensor& touched,
    const Tensor& rows, int64_t tiles, double norm_type) {
  launch(
      &shardgrad_cuda_norm, check_norm(out, scratch, flat, touched, rows, tiles, norm_type), out);
}

}  // namespace
}  // namespace shardgrad::cuda

STABLE_TORCH_LIBRARY_IMPL(shardgrad, CUDA, library) {
  library.impl("adam_", TORCH_BOX(&shardgrad::cuda::adam));
  library.impl("sgd_", TORCH_BOX(&shardgrad::cuda::sgd));
  library.impl("norm_", TORCH_BOX(&shardgrad::cuda::norm));
}
