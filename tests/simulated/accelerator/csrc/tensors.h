// Between torch's tensors and the simulator: a CPU tensor on the same bytes, and which bytes an
// access covers.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>

#include "allocator.h"
#include "position.h"

namespace simulated {

inline bool is_simulated(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// Returns a CPU tensor on the bytes of a simulated one; it owns nothing and bumps no version.
inline at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::DataPtr bytes(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  // Resizable, for ops that resize their `out`; the caller moves the result back.
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// Appends the bytes that an access to `tensor` covers: exact, unless they lie in very many pieces.
inline void append_accesses(const at::Tensor& tensor, bool writes, std::vector<Access>& accesses) {
  if (!is_simulated(tensor) || tensor.numel() == 0) return;
  constexpr int64_t kManyPieces = 1024;
  auto item = static_cast<int64_t>(tensor.itemsize());
  auto base = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * item;
  std::vector<std::pair<int64_t, int64_t>>
      dims;  // stride and size in bytes and elements, inner first
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1 && tensor.stride(i) > 0)
      dims.emplace_back(tensor.stride(i) * item, tensor.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t run = item;
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) {
    run = dims[inner].first * (dims[inner].second - 1) + run;
    ++inner;
  }
  int64_t pieces = 1, span = run;
  for (size_t i = inner; i < dims.size(); ++i) {
    pieces *= dims[i].second;
    span += dims[i].first * (dims[i].second - 1);
  }
  if (pieces > kManyPieces) {
    accesses.push_back({base, static_cast<size_t>(span), writes});
    return;
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t offset = 0, rest = piece;
    for (size_t i = inner; i < dims.size(); ++i) {
      offset += rest % dims[i].second * dims[i].first;
      rest /= dims[i].second;
    }
    accesses.push_back({base + offset, static_cast<size_t>(run), writes});
  }
}

// Returns a new simulated tensor on the current device, shaped like `like`; its content is
// undefined.
inline at::Tensor empty_like_on_device(const at::Tensor& like) {
  return at::detail::empty_strided_generic(
      like.sizes(), like.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      like.scalar_type());
}

}  // namespace simulated
