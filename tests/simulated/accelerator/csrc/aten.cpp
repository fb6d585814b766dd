// Ops that make memory, change only metadata, or move data between devices and the host.

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tensors.h"

namespace simulated {

namespace {

using Ints = c10::SymIntArrayRef;

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, Ints size, Ints stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset) begin = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begin);
}

at::Tensor view(const at::Tensor& self, Ints size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, Ints size, Ints stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(
    const at::Tensor& self, Ints size, std::optional<c10::MemoryFormat> format) {
  OnDevice on(self.device().index());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, Ints size, Ints stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true));
  impl->set_sizes_and_strides(at::IntArrayRef({0}), at::IntArrayRef({1}), 0);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

// Between two devices a copy runs on the source's stream, and each side's stream waits for the
// other's.
void order_devices(int from, int to) {
  auto& simulator = Simulator::get();
  Event here, there;
  Site site = site_of("copy_");
  simulator.record(there, to, current_stream(to), site);
  simulator.wait(there, from, current_stream(from), site);
  simulator.record(here, from, current_stream(from), site);
  simulator.wait(here, to, current_stream(to), site);
}

void copy_between(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  int device = is_simulated(from) ? from.device().index() : to.device().index();
  bool with_host = !is_simulated(from) || !is_simulated(to);
  auto& simulator = Simulator::get();
  if (with_host && !non_blocking && simulator.capturing(device))
    throw Refusal(
        Error::HostSyncInCapture,
        "a blocking copy between the host and sim:" + std::to_string(device) +
            " during a capture of this device");
  if (!with_host && from.device() != to.device())
    order_devices(from.device().index(), to.device().index());
  OnDevice on(device);
  Site site = site_of("aten::copy_");
  auto work = simulator.begin(device, current_stream(device), site, "aten::copy_");
  std::vector<Access> accesses;
  append_accesses(from, false, accesses);
  append_accesses(to, true, accesses);
  simulator.touch(work, accesses);
  at::Tensor source = on_cpu(from), target = on_cpu(to);
  // What a capture writes to the device is undone at its end; nothing is for the host.
  if (work.graph == nullptr || is_simulated(to)) target.copy_(source);
  if (work.graph != nullptr) {
    auto run = [source, target] { target.copy_(source); };
    simulator.append(
        *work.graph, {Item::Launch, work.stamp.lane, site, std::move(accesses), run, {}, 0});
  } else if (with_host && (!non_blocking || !is_simulated(to))) {
    simulator.synchronize_stream(device, current_stream(device));
  } else if (!with_host && from.device() != to.device()) {
    order_devices(from.device().index(), to.device().index());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  told([&] { copy_between(self, to, non_blocking); });
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  int device = self.device().index();
  OnDevice on(device);
  Site site = site_of("aten::item");
  told([&] {
    auto& simulator = Simulator::get();
    if (simulator.capturing(device))
      simulator.synchronize_stream(device, current_stream(device));  // refuses
    auto work = simulator.begin(device, current_stream(device), site, "aten::item");
    std::vector<Access> accesses;
    append_accesses(self, false, accesses);
    simulator.touch(work, accesses);
    simulator.synchronize_stream(device, current_stream(device));
  });
  return on_cpu(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  auto address = reinterpret_cast<uintptr_t>(self.storage().data());
  told([&] { Simulator::get().record_stream(address, stream.device_index(), stream.id()); });
}

// Attention in plain ops: the fused kernels are not the CPU's to give.
int64_t attention_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;
}

// The CPU's kernel asks for no generator and would draw from the host's.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  at::Tensor kept = at::empty_like(input, input.options().dtype(at::kBool));
  if (train.has_value() && !*train) return {input.clone(), kept.fill_(true)};
  kept.bernoulli_(1 - p);
  return {input.mul(kept).mul(at::Scalar(p < 1 ? 1 / (1 - p) : 0.0)), kept};
}

// The state of a device's default generator; setting it takes a state of the same kind.
at::Tensor generator_state(int64_t device) {
  return cpu_generator(static_cast<int>(device)).get_state();
}

void set_generator_state(int64_t device, const at::Tensor& state) {
  cpu_generator(static_cast<int>(device)).set_state(state);
}

void seed_generator(int64_t device, int64_t seed) {
  cpu_generator(static_cast<int>(device)).set_current_seed(static_cast<uint64_t>(seed));
}

}  // namespace
}  // namespace simulated

TORCH_LIBRARY_FRAGMENT(simulated, library) {
  library.def("generator_state(int device) -> Tensor", simulated::generator_state);
  library.def(
      "set_generator_state(int device, Tensor state) -> ()", simulated::set_generator_state);
  library.def("seed_generator(int device, int seed) -> ()", simulated::seed_generator);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using namespace simulated;
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_to_nothing);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", attention_choice);
  library.impl("native_dropout", native_dropout);
}
