// Streams and events as torch sees them: `torch.Stream`, `torch.Event`, `torch.accelerator` and
// autograd.

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "position.h"

namespace simulated {

namespace {

thread_local int this_device = 0;
thread_local std::array<int64_t, kDevices> this_stream{};

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device device_of(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

int index_of(c10::Device device) { return device.has_index() ? device.index() : this_device; }

Event& event_of(void* event) { return *static_cast<Event*>(event); }

}  // namespace

int current_device() { return this_device; }

void set_current_device(int device) {
  TORCH_CHECK_INDEX(
      device >= 0 && device < kDevices, "expected a device from sim:0 to sim:", kDevices - 1,
      ", got sim:", device);
  this_device = device;
}

int64_t current_stream(int device) { return this_stream[device]; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return device_of(this_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < kDevices) this_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    int index = index_of(device);
    return stream_of(index, this_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    int index = index_of(device);
    return stream_of(index, Simulator::get().next_pooled_stream(index, priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int index = index_of(stream.device());
    auto before = stream_of(index, this_stream[index]);
    this_stream[index] = stream.id();
    return before;
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return Simulator::get().capturing(stream.device_index(), stream.id());
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag) const override {
    int index = stream.device_index();
    if (*event == nullptr) *event = new Event();
    Event& made = event_of(*event);
    if (stream.id() < 0) {  // an event that is known to torch and not recorded: see device.py
      made.device = index;
      return;
    }
    if (device >= 0 && device != index)
      fail(
          Error::OtherDevice,
          "record: expected a stream of sim:" + std::to_string(device) +
              ", where the event is, got one of sim:" + std::to_string(index));
    Site site = site_of("record");
    told([&] { Simulator::get().record(made, index, stream.id(), site); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Site site = site_of("wait");
    told([&] { Simulator::get().wait(event_of(event), stream.device_index(), stream.id(), site); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  // Work is done when it is launched, so queries succeed; like on a device, the host then knows it.
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) told([&] { Simulator::get().synchronize_event(event_of(event)); });
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    told([&] { Simulator::get().synchronize_stream(stream.device_index(), stream.id()); });
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    told([&] { Simulator::get().synchronize_device(device < 0 ? this_device : device); });
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    auto address = reinterpret_cast<uintptr_t>(data.get());
    told([&] { Simulator::get().record_stream(address, stream.device_index(), stream.id()); });
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace simulated
