// In the place of csrc/cuda/binding.h: a launch is a call.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "launch.h"

namespace shardgrad::cuda {

template <class Arguments>
void launch(
    int (*launcher)(const Arguments*, void*), const Arguments& arguments,
    const torch::stable::Tensor&) {
  const int status = launcher(&arguments, nullptr);
  STD_TORCH_CHECK(status == 0, "launch failed: ", shardgrad_cuda_error(status));
}

}  // namespace shardgrad::cuda
