// Runs any op on a simulated device: the CPU's kernel on the same bytes, with its reads and writes
// taken from the schema. Ops that cannot go this way are in aten.cpp.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <memory>
#include <set>

#include "services.h"
#include "tensors.h"

namespace simulated {

namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr auto kCpuKeys = c10::DispatchKeySet(c10::DispatchKey::CPU);

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
  }
}

template <typename Map>
IValue with_tensors(const IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

std::string op_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Ops whose result the host must see before it can go on.
bool needs_host(const std::string& name, const std::vector<IValue>& args) {
  static const std::set<std::string> ops = {
      "aten::equal",
      "aten::nonzero",
      "aten::masked_select",
      "aten::_unique",
      "aten::_unique2",
      "aten::unique_dim",
      "aten::unique_consecutive",
      "aten::bincount",
      "aten::unique_dim_consecutive",
      "aten::repeat_interleave"};
  if (ops.count(name) != 0) return true;
  bool by_mask = false;  // indexing by a mask counts the mask first
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_")
    each_tensor(args[1], [&](const at::Tensor& index) {
      by_mask = by_mask || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
  return by_mask;
}

// True for arguments that an op writes although its schema is silent about it.
bool writes_in_secret(const std::string& name, size_t argument, const std::vector<IValue>& args) {
  return name == "aten::native_batch_norm" && (argument == 3 || argument == 4) && args[5].toBool();
}

// CPU tensors that may meet simulated ones: numbers, indices, and the host-side tables of our own
// ops.
bool may_be_on_cpu(const std::string& name, const at::Tensor& tensor) {
  return tensor.dim() == 0 || name.rfind("aten::", 0) != 0 || name.rfind("aten::index", 0) == 0 ||
      name.rfind("aten::_index", 0) == 0 || name.rfind("aten::_foreach_copy", 0) == 0;
}

// Returns the device that an op runs on, after checking that its tensors agree.
int device_of(const std::string& name, const std::vector<IValue>& args) {
  int device = -1;
  std::string other;
  for (const IValue& arg : args)
    each_tensor(arg, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.numel() == 0) {
        if (is_simulated(tensor) && device < 0) device = tensor.device().index();
      } else if (is_simulated(tensor)) {
        if (device >= 0 && device != tensor.device().index()) other = tensor.device().str();
        if (device < 0) device = tensor.device().index();
      } else if (!may_be_on_cpu(name, tensor)) {
        other = tensor.device().str();
      }
    });
  for (const IValue& arg : args)
    if (device < 0 && arg.isDevice() && arg.toDevice().has_index()) device = arg.toDevice().index();
  if (device < 0) device = current_device();
  if (!other.empty())
    throw Refusal(
        Error::MixedDevices,
        name + ": expected all tensors on sim:" + std::to_string(device) + ", got one on " + other);
  return device;
}

// Copies arguments for one call: a kernel may take the tensors out of a list that it is given.
Stack own_lists(const Stack& args) {
  Stack copies;
  for (const IValue& arg : args)
    copies.push_back(with_tensors(arg, [](const at::Tensor& tensor) { return tensor; }));
  return copies;
}

// One call of an op: its arguments here, and their aliases on the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> args)
      : op_(op),
        schema_(op.schema()),
        name_(schema_.operator_name().name),
        args_(std::move(args)) {}

  void run(Stack* results);

 private:
  IValue argument_for_cpu(const IValue& value) const;
  std::vector<Access> accesses() const;
  at::Tensor take(const at::Tensor& result);
  IValue returned(size_t index, const IValue& result);
  void move_resized(size_t index);
  void record(const Simulator::Work& work, std::vector<Access> accesses, bool resized);

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  std::vector<IValue> args_;
  Stack on_cpu_;
  int device_ = 0;
  std::vector<at::Tensor> made_;  // results in memory of their own, and which result each is
  std::vector<std::pair<size_t, size_t>> made_from_;
  bool resized_ = false;
};

IValue Call::argument_for_cpu(const IValue& value) const {
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isGenerator()) return cpu_generator(value.toGenerator());
  return with_tensors(value, on_cpu);
}

std::vector<Access> Call::accesses() const {
  std::vector<Access> found;
  for (size_t i = 0; i < args_.size(); ++i) {
    const auto* alias = schema_.arguments()[i].alias_info();
    bool writes = (alias != nullptr && alias->isWrite()) || writes_in_secret(name_, i, args_);
    each_tensor(
        args_[i], [&](const at::Tensor& tensor) { append_accesses(tensor, writes, found); });
  }
  return found;
}

// Brings a result of the CPU's kernel to the device: as a view if it lies in an argument, else as a
// copy.
at::Tensor Call::take(const at::Tensor& result) {
  if (!result.defined()) return result;
  at::Tensor taken;
  for (const IValue& arg : args_)
    each_tensor(arg, [&](const at::Tensor& tensor) {
      if (taken.defined() || !is_simulated(tensor) || result.storage().data() == nullptr) return;
      if (tensor.storage().data() != result.storage().data()) return;
      taken = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
      taken.unsafeGetTensorImpl()->set_sizes_and_strides(
          result.sizes(), result.strides(), result.storage_offset());
    });
  if (taken.defined()) return taken;
  taken = empty_like_on_device(result);
  made_.push_back(taken);
  on_cpu(taken).copy_(result);
  return taken;
}

// An `out` that the kernel has resized: the device's tensor follows.
void Call::move_resized(size_t index) {
  if (!args_[index].isTensor()) return;
  const at::Tensor& ours = args_[index].toTensor();
  at::Tensor theirs = on_cpu_[index].toTensor();
  if (!is_simulated(ours) || ours.sizes() == theirs.sizes()) return;
  resized_ = true;
  at::Tensor kept = theirs.clone();
  ours.resize_(kept.sizes());
  on_cpu(ours).copy_(kept);
}

IValue Call::returned(size_t index, const IValue& result) {
  const auto* alias = schema_.returns()[index].alias_info();
  if (alias != nullptr && alias->isWrite())
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto* argument = schema_.arguments()[i].alias_info();
      if (argument != nullptr && *argument == *alias) return args_[i];
    }
  size_t element = 0;
  return with_tensors(result, [&](const at::Tensor& tensor) {
    size_t before = made_.size();
    at::Tensor taken = take(tensor);
    if (made_.size() > before) made_from_.emplace_back(index, element);
    ++element;
    return taken;
  });
}

void Call::run(Stack* results) {
  device_ = device_of(name_, args_);
  OnDevice on(device_);
  Site site = site_of(op_name(op_));
  auto& simulator = Simulator::get();
  auto work = simulator.begin(device_, current_stream(device_), site, name_.c_str());
  auto touched = accesses();
  simulator.touch(work, touched);
  if (needs_host(name_, args_)) simulator.synchronize_stream(device_, current_stream(device_));
  for (const IValue& arg : args_) on_cpu_.push_back(argument_for_cpu(arg));
  for (size_t i = 0; i < args_.size(); ++i)
    if (args_[i].isNone() && schema_.arguments()[i].name() == "generator")
      on_cpu_[i] = cpu_generator(device_);
  Stack stack = own_lists(on_cpu_);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op_.redispatchBoxed(kCpuKeys, &stack);
  for (size_t i = 0; i < args_.size(); ++i) {
    const auto* alias = schema_.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) move_resized(i);
  }
  for (size_t i = 0; i < schema_.returns().size(); ++i) results->push_back(returned(i, stack[i]));
  std::vector<Access> outputs;
  for (const at::Tensor& tensor : made_) append_accesses(tensor, true, outputs);
  simulator.touch(work, outputs);
  if (work.graph == nullptr) return;
  touched.insert(touched.end(), outputs.begin(), outputs.end());
  record(work, std::move(touched), resized_);
}

// Keeps aliases only, as a graph keeps addresses only: it does not hold on to anybody's memory.
void Call::record(const Simulator::Work& work, std::vector<Access> accesses, bool resized) {
  auto args = std::make_shared<Stack>(std::move(on_cpu_));
  for (size_t i = 0; i < args_.size(); ++i) {
    if (resized) (*args)[i] = argument_for_cpu(args_[i]);
    // Numbers go into a launch by value.
    (*args)[i] = with_tensors((*args)[i], [&](const at::Tensor& tensor) {
      bool number = tensor.defined() && tensor.dim() == 0 && args_[i].isTensor() &&
          !is_simulated(args_[i].toTensor());
      if (!number) return tensor;
      at::Tensor value = tensor.clone();
      // A Python number takes the dtype of what it meets, and so must its copy.
      value.unsafeGetTensorImpl()->set_wrapped_number(
          tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return value;
    });
  }
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& tensor : made_) outputs.push_back(on_cpu(tensor));
  auto run = [op = op_, args, outputs, from = made_from_] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Stack stack = own_lists(*args);
    op.redispatchBoxed(kCpuKeys, &stack);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const IValue& result = stack[from[i].first];
      outputs[i].copy_(
          result.isTensor() ? result.toTensor() : result.toTensorVector()[from[i].second]);
    }
  };
  Simulator::get().append(
      *work.graph,
      {Item::Launch, work.stamp.lane, work.stamp.site, std::move(accesses), run, {}, 0});
}

void run_on_device(const c10::OperatorHandle& op, Stack* stack) {
  size_t count = op.schema().arguments().size();
  std::vector<IValue> args(stack->end() - count, stack->end());
  stack->resize(stack->size() - count);
  told([&] { Call(op, std::move(args)).run(stack); });
}

}  // namespace

std::string running_autograd_node() {
  auto node = torch::autograd::get_current_node();
  return node == nullptr ? "" : node->name();
}

void adopt_namespace(const std::string& name) {
  static auto* library = new std::map<std::string, std::unique_ptr<torch::Library>>();
  static auto* adopted = new std::set<std::string>();
  auto& ours = (*library)[name];
  if (ours == nullptr)
    ours = std::make_unique<torch::Library>(
        torch::Library::IMPL, name, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.rfind(name + "::", 0) != 0) continue;
    std::string local = op.name.substr(name.size() + 2);
    std::string full = op.overload_name.empty() ? local : local + "." + op.overload_name;
    if (adopted->insert(name + "::" + full).second)
      ours->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  }
}

}  // namespace simulated

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run_on_device>());
}
