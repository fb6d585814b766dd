// From a checked call to a launch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "launch.h"

namespace shardgrad::cuda {

// Launches on the current stream of the device that `home` lives on, with that device current.
template <class Arguments>
void launch(
    int (*launcher)(const Arguments*, void*), const Arguments& arguments,
    const torch::stable::Tensor& home) {
  const auto device = home.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const int status = launcher(&arguments, stream);
  STD_TORCH_CHECK(status == 0, "CUDA launch failed: ", shardgrad_cuda_error(status));
}

}  // namespace shardgrad::cuda
