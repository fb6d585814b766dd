#include "allocator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "position.h"

namespace simulated {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

void release(void* memory) {
  Site site = site_of("free");
  Simulator::get().free(reinterpret_cast<uintptr_t>(memory), site);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device();
    c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) return {nullptr, nullptr, &release, where};
    Site site = site_of("allocate");
    uintptr_t base = told(
        [&] { return Simulator::get().allocate(device, current_stream(device), nbytes, site); });
    auto* memory = reinterpret_cast<void*>(base);
    std::memset(memory, 0xff, nbytes);  // NaN, so that what nobody wrote is noticed
    return {memory, memory, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto address = reinterpret_cast<uintptr_t>(data.get());
    told([&] { Simulator::get().record_stream(address, stream.device_index(), stream.id()); });
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { Simulator::get().reset_peak(device); }
};

Allocator the_allocator;

// A generator of a simulated device. Kernels are the CPU's and want a CPU generator, which it keeps
// inside.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device, at::Generator inner)
      : c10::GeneratorImpl(
            c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }

  at::Generator inner;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < kDevices; ++i)
      all->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return all;
  }();
  return made->at(device < 0 ? current_device() : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? getCurrentDevice() : device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, getCurrentDevice()}; }

  // `untyped_storage().resize_()`: a new block, and what fits of the old content.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    OnDevice on(storage.device().index());
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = the_allocator.allocate(nbytes);
    size_t kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
      auto from = reinterpret_cast<uintptr_t>(storage.data());
      auto to = reinterpret_cast<uintptr_t>(fresh.get());
      copy_bytes(from, to, kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }

 private:
  static void copy_bytes(uintptr_t from, uintptr_t to, size_t nbytes) {
    int device = current_device();
    Site site = site_of("resize_");
    auto& simulator = Simulator::get();
    auto work =
        told([&] { return simulator.begin(device, current_stream(device), site, "resize_"); });
    std::vector<Access> accesses = {{from, nbytes, false}, {to, nbytes, true}};
    simulator.touch(work, accesses);
    auto run = [=] {
      std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), nbytes);
    };
    run();
    if (work.graph != nullptr)
      simulator.append(*work.graph, {Item::Launch, work.stamp.lane, site, accesses, run, {}, 0});
  }
};

struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} register_hooks;

}  // namespace

REGISTER_ALLOCATOR(kType, &the_allocator);

c10::Allocator* allocator() { return &the_allocator; }

at::Generator cpu_generator(const at::Generator& given) {
  auto* ours = dynamic_cast<Generator*>(given.unsafeGetGeneratorImpl());
  return ours == nullptr ? given : ours->inner;
}

at::Generator cpu_generator(int device) { return cpu_generator(default_generator(device)); }

std::function<void()> remember_generators(int device) {
  std::vector<std::pair<at::Generator, c10::intrusive_ptr<c10::TensorImpl>>> states;
  for (auto generator : {cpu_generator(device), at::detail::getDefaultCPUGenerator()})
    states.emplace_back(generator, generator.unsafeGetGeneratorImpl()->get_state());
  return [states] {
    for (const auto& [generator, state] : states)
      generator.unsafeGetGeneratorImpl()->set_state(*state);
  };
}

}  // namespace simulated
