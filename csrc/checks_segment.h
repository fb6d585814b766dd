// From torch's tensors to plain arguments, for the ops on segments; as checks.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "segment.h"

namespace shardgrad {

using MaybeTensor = std::optional<torch::stable::Tensor>;

UpdateArguments check_adam(
    const torch::stable::Tensor& param, const torch::stable::Tensor& grad,
    const torch::stable::Tensor& exp_avg, const torch::stable::Tensor& exp_avg_sq,
    const MaybeTensor& master, const torch::stable::Tensor& steps,
    const torch::stable::Tensor& ticket, const torch::stable::Tensor& touched,
    const torch::stable::Tensor& rows, int64_t tiles, const torch::stable::Tensor& hyper,
    const MaybeTensor& scale, const MaybeTensor& found_inf, bool decoupled, bool maximize,
    bool stochastic_rounding, int64_t seed);

UpdateArguments check_sgd(
    const torch::stable::Tensor& param, const torch::stable::Tensor& grad,
    const MaybeTensor& momentum_buffer, const MaybeTensor& master,
    const torch::stable::Tensor& steps, const torch::stable::Tensor& ticket,
    const torch::stable::Tensor& touched, const torch::stable::Tensor& rows, int64_t tiles,
    const torch::stable::Tensor& hyper, const MaybeTensor& scale, const MaybeTensor& found_inf,
    bool nesterov, bool decoupled, bool maximize, bool stochastic_rounding, int64_t seed);

NormArguments check_norm(
    const torch::stable::Tensor& out, const torch::stable::Tensor& scratch,
    const torch::stable::Tensor& flat, const torch::stable::Tensor& touched,
    const torch::stable::Tensor& rows, int64_t tiles, double norm_type);

// The numbers inside the table. Only where the host can read it; elsewhere whoever built it has
// checked it.
void check_rows(const UpdateArguments& args);
void check_rows(const NormArguments& args);

}  // namespace shardgrad
