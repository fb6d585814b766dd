// Right values without a device: every operator that has a CUDA kernel runs it, so that its
// allocations and launches happen, and where its last launch stands the CPU's kernel runs over the
// same memory, at each replay again.
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "interface.h"

namespace {

using c10::DispatchKey;
using c10::IValue;
using hostcuda::Body;
using hostcuda::Range;
using torch::jit::Stack;

// What an operator does on the CPU.
struct Call {
  c10::OperatorHandle op;
  Stack inputs;  // over the device's memory
  std::vector<at::Tensor> outputs;
  bool random;
};

std::mutex mutex;
std::unordered_map<std::string, c10::SafeKernelFunction> kernels;
std::map<std::string, int> failures;
std::atomic<uint64_t> labels{0};
thread_local int depth = 0;

// -- from the device's memory to tensors of the CPU
// -----------------------------------------------------------

at::Tensor on_cpu(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda() || t.layout() != at::kStrided) return t;
  const auto& storage = t.storage();
  at::DataPtr data(hostcuda::on_host(storage.data()), at::kCPU);
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(DispatchKey::CPU), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

// The same memory, without an object of Python's: the end of that would need Python's lock, on
// whichever thread it comes.
at::Tensor unknown_to_python(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

// A tensor of the host is read when its copy runs if it is pinned, else when the call is made.
at::Tensor input(const at::Tensor& t, bool captured) {
  if (!t.defined() || !t.is_cpu() || t.layout() != at::kStrided || !t.numel()) return on_cpu(t);
  if (hostcuda::is_pinned(t.data_ptr()) || (captured && t.dim())) return unknown_to_python(t);
  return t.clone();
}

IValue input(const IValue& value, bool written, bool captured) {
  if (value.isTensor())
    return written ? on_cpu(value.toTensor()) : input(value.toTensor(), captured);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList())
      list.push_back(written ? on_cpu(each) : input(each, captured));
    return list;
  }
  if (value.isDevice()) return value.toDevice().is_cuda() ? IValue(c10::Device(at::kCPU)) : value;
  if (value.isList() &&
      value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {  // indices
    c10::List<std::optional<at::Tensor>> made;
    for (const IValue& each : value.toListRef())
      made.push_back(
          each.isNone() ? std::nullopt
                        : std::optional<at::Tensor>(input(each.toTensor(), captured)));
    return made;
  }
  return value;
}

void flatten(const IValue& value, std::vector<at::Tensor>& into) {
  if (value.isTensor()) into.push_back(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorList()) into.push_back(each);
  if (value.isList() && !value.isTensorList())
    for (const IValue& each : value.toListRef())
      if (each.isTensor()) into.push_back(each.toTensor());
}

void copy_lists(Stack& inputs) {  // kernels may empty a list
  for (IValue& each : inputs)
    if (each.isTensorList()) each = each.toTensorList().copy();
}

// The memory that a tensor lies in, from its first element to its last.
void add_range(std::vector<Range>& into, const at::Tensor& t, bool write) {
  if (!t.defined() || t.layout() != at::kStrided || !t.numel() || !t.storage().data()) return;
  if (t.is_cpu() && !hostcuda::is_pinned(t.data_ptr())) return;
  size_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  into.push_back(
      {(const char*)t.storage().data() + t.storage_offset() * t.itemsize(),
       (last + 1) * t.itemsize(), write});
}

std::vector<Range> ranges_of(
    const c10::OperatorHandle& op, const Stack& inputs, const std::vector<at::Tensor>& outputs) {
  std::vector<Range> ranges;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& argument = op.schema().arguments()[i];
    std::vector<at::Tensor> tensors;
    flatten(inputs[i], tensors);
    for (auto& t : tensors) {
      if (!argument.is_out()) add_range(ranges, t, false);
      if (argument.alias_info() && argument.alias_info()->isWrite()) add_range(ranges, t, true);
    }
  }
  for (auto& t : outputs) add_range(ranges, t, true);
  return ranges;
}

// -- random numbers: a function of the CUDA generator's seed and offset
// ---------------------------------------

uint64_t mix(uint64_t seed, uint64_t offset) {
  uint64_t z = seed * 0x9e3779b97f4a7c15 + offset + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  return (z ^ (z >> 27)) >> 1;
}

// Where the next draw of an operator starts, as its kernel is told: in a capture, by an address on
// the device.
std::optional<at::PhiloxCudaState> next_draw(const Stack& inputs, c10::Device device) {
  at::Generator source = at::globalContext().defaultGenerator(device);
  for (const IValue& each : inputs)
    if (each.isGenerator()) source = each.toGenerator();
  if (!source.device().is_cuda()) return std::nullopt;
  std::lock_guard<std::mutex> lock(source.mutex());
  try {
    return source.get<at::CUDAGeneratorImpl>()->philox_cuda_state(0);
  } catch (const std::exception&) {  // of no graph; the kernel says so, if it draws
    return std::nullopt;
  }
}

uint64_t seed_of(const std::optional<at::PhiloxCudaState>& draw) {
  if (!draw) return 0;
  if (!draw->captured_) return mix(draw->seed_.val, draw->offset_.val);
  const auto at = [](int64_t* address) { return *(const int64_t*)hostcuda::on_host(address); };
  return mix(at(draw->seed_.ptr), at(draw->offset_.ptr) + draw->offset_intragraph_);
}

// -- the CPU's kernel
// -----------------------------------------------------------------------------------------

Stack call_kernel(const c10::OperatorHandle& op, Stack inputs) {
  copy_lists(inputs);
  if (op.schema().name() == "aten::_conv_depthwise2d") {  // which only CUDA has
    const at::Tensor self = inputs[0].toTensor();
    const auto numbers = [&](size_t place) { return inputs[place].toIntVector(); };
    const auto bias = inputs[3].toOptional<at::Tensor>();
    return {IValue(
        at::conv2d(
            self, inputs[1].toTensor(), bias, numbers(4), numbers(5), numbers(6), self.size(1)))};
  }
  Stack again = inputs;
  copy_lists(again);
  try {
    op.callBoxed(&inputs);
    return inputs;
  } catch (const std::exception&) {  // the CPU may lack a mixture of dtypes
    if (op.schema().is_mutable()) throw;
    for (IValue& each : again)
      if (each.isTensor() && each.toTensor().defined() &&
          (each.toTensor().is_floating_point() || op.schema().name() == "aten::histc"))
        each = each.toTensor().to(at::kFloat);
    op.callBoxed(&again);
    return again;
  }
}

// Runs it and puts the results where the CUDA kernel would have put them.
Stack run(const Call& call, uint64_t seed) {
  ++depth;
  c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet(
          {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::AutocastCPU,
           DispatchKey::AutocastCUDA, DispatchKey::PreDispatch}));
  at::Generator host = at::globalContext().defaultGenerator(at::kCPU);
  at::Tensor before;
  Stack results = call.inputs;
  if (call.random) {
    before = host.get_state();
    host.set_current_seed(seed);
    for (IValue& each : results)
      if (each.isGenerator()) each = IValue();
  }
  try {
    results = call_kernel(call.op, std::move(results));
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!failures[call.op.schema().name()]++)
      fprintf(
          stderr, "[hostcuda] no values from %s: %.300s\n", call.op.schema().name().c_str(),
          error.what());
    hostcuda::finding("no values from " + call.op.schema().name());
    results.clear();
  }
  if (call.random) host.set_state(before);
  std::vector<at::Tensor> tensors;
  for (const IValue& each : results) flatten(each, tensors);
  for (size_t i = 0; i < tensors.size() && i < call.outputs.size(); ++i) {
    const at::Tensor &from = tensors[i], &to = call.outputs[i];
    if (!from.defined() || !to.defined() || from.is_same(to) || to.layout() != at::kStrided)
      continue;
    if (to.device().is_cpu() && from.storage().data() == to.storage().data()) continue;
    if (from.sizes() == to.sizes() && to.numel()) to.copy_(from);
  }
  --depth;
  return results;
}

c10::Device device_of(const Stack& inputs) {
  c10::Device device(at::kCPU);
  for (const IValue& each : inputs) {
    if (each.isDevice() && each.toDevice().is_cuda()) device = each.toDevice();
    std::vector<at::Tensor> tensors;
    flatten(each, tensors);
    for (auto& t : tensors)
      if (t.defined() && t.is_cuda()) device = t.device();
  }
  if (device.is_cuda() && !device.has_index())
    device = c10::Device(at::kCUDA, c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index());
  return device;
}

// Puts in what only the device would have found out: numbers for the host, and shapes.
void correct(Stack* stack, size_t returns, const Stack& results) {
  for (size_t i = 0; i < results.size() && i < returns; ++i) {
    IValue& out = *(stack->end() - returns + i);
    if (!results[i].isTensor() && !results[i].isTensorList()) {
      out = results[i];
    } else if (
        results[i].isTensor() && out.isTensor() && results[i].toTensor().defined() &&
        results[i].toTensor().sizes() != out.toTensor().sizes()) {
      ++depth;
      at::Tensor from = results[i].toTensor();
      at::Tensor made = at::empty_like(from, from.options().device(out.toTensor().device()));
      hostcuda::finish_launched();  // what lay there before is gone
      on_cpu(made).copy_(from);
      out = made;
      --depth;
    }
  }
}

// -- an operator on CUDA
// --------------------------------------------------------------------------------------

struct Scope {  // while the CUDA kernel runs, nested operators are its own business
  explicit Scope(uint64_t label) { hostcuda::begin_operator(label), ++depth; }
  ~Scope() {
    --depth;
    if (!ended) hostcuda::end_operator(nullptr, {}, {});
  }
  bool ended = false;
};

void wrapper(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const std::string name = op.schema().name() + "." + op.schema().overload_name();
  c10::SafeKernelFunction& kernel = kernels.at(name);
  const size_t count = op.schema().arguments().size(), returns = op.schema().returns().size();
  Stack inputs(stack->end() - count, stack->end());
  const c10::Device device = depth ? c10::Device(at::kCPU) : device_of(inputs);
  if (!device.is_cuda()) return kernel.callBoxed(op, keys, stack);
  copy_lists(inputs);
  const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  const auto draw = random ? next_draw(inputs, device) : std::nullopt;
  Scope scope(++labels);
  kernel.callBoxed(op, keys, stack);
  const hostcuda::Launched launched = hostcuda::launched();
  if (!launched.eager && !launched.captured) return;
  if (launched.computes) {
    scope.ended = true;
    return hostcuda::end_operator(name.c_str(), ranges_of(op, inputs, {}), {});
  }
  std::vector<at::Tensor> outputs, written;
  for (auto it = stack->end() - returns; it != stack->end(); ++it) flatten(*it, outputs);
  for (auto& each : outputs) written.push_back(on_cpu(each));
  std::vector<Range> ranges;
  if (launched.captured || hostcuda::wants_ranges()) ranges = ranges_of(op, inputs, outputs);
  auto call = std::make_shared<Call>(Call{op, {}, std::move(written), random});
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    call->inputs.push_back(input(inputs[i], alias && alias->isWrite(), launched.captured));
  }
  scope.ended = true;
  if (launched.captured) {
    if (draw)
      for (int64_t* each : {draw->seed_.ptr, draw->offset_.ptr})
        ranges.push_back({(const char*)each, 8, false});
    return hostcuda::end_operator(name.c_str(), std::move(ranges), [=]() -> Body {
      return [=] { return run(*call, seed_of(draw)), true; };
    });
  }
  const uint64_t mixed = seed_of(draw);
  bool at_once = launched.waited;
  for (size_t i = 0; i < returns; ++i) {
    const IValue& out = *(stack->end() - returns + i);
    at_once = at_once || !(out.isTensor() || out.isTensorList());
  }
  if (!at_once)
    return hostcuda::end_operator(name.c_str(), std::move(ranges), [=]() -> Body {
      return [=] { return run(*call, mixed), true; };
    });
  hostcuda::finish_launched();
  hostcuda::end_operator(name.c_str(), std::move(ranges), {});
  correct(stack, returns, run(*call, mixed));
}

std::vector<torch::Library>& libraries() {
  static auto* made = new std::vector<torch::Library>;
  return *made;
}

// They allocate, or speak of memory, and launch nothing.
const std::set<std::string> WITHOUT_KERNEL = {
    "aten::empty",         "aten::empty_like", "aten::empty_strided",
    "aten::new_empty",     "aten::resize_",    "aten::set_",
    "aten::record_stream", "aten::is_pinned",  "aten::_pin_memory"};
// One kernel for all devices, which launches by itself.
const std::set<std::string> FOR_ALL_DEVICES = {"aten::copy_"};

}  // namespace

// Takes over every operator with a CUDA kernel in a namespace; again after another library was
// loaded.
extern "C" HOSTCUDA int hostcuda_values(const char* name_space) {
  int count = 0;
  libraries().emplace_back(torch::Library::IMPL, name_space, DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind(std::string(name_space) + "::", 0) || WITHOUT_KERNEL.count(name.name))
      continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) && !FOR_ALL_DEVICES.count(name.name))
      continue;
    const std::string full = name.name + "." + name.overload_name;
    if (kernels.count(full)) continue;
    kernels.emplace(full, op->getComputedKernelForDispatchKey(DispatchKey::CUDA));
    const std::string local = name.name.substr(name.name.find("::") + 2) +
        (name.overload_name.empty() ? "" : "." + name.overload_name);
    libraries().back().impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&wrapper>());
    ++count;
  }
  return count;
}

// Tells the runtime what torch's allocator does with memory of no graph. Not before CUDA is
// initialized.
extern "C" HOSTCUDA void hostcuda_watch_allocator() {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    if (entry.mempool_ != c10::MempoolId_t{0, 0}) return;
    const void* pointer = reinterpret_cast<const void*>(entry.addr_);
    const auto stream = static_cast<cudaStream_t>(entry.stream_);
    if (entry.action_ == TraceEntry::FREE_COMPLETED) hostcuda::freed(pointer, entry.size_, stream);
    if (entry.action_ == TraceEntry::ALLOC) hostcuda::allocated(pointer, entry.size_, stream);
    if (entry.action_ == TraceEntry::SEGMENT_FREE) hostcuda::returned(pointer, entry.size_);
  });
}
