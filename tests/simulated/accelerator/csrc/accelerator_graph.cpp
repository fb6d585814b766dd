// `torch.accelerator.Graph` on a simulated device, and the allocator of pinned memory whose cache
// that class empties first. Torch has it from 2.13 on; before that this file is empty.

#if __has_include(<ATen/core/GraphImplInterface.h>)

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "graph.h"

namespace simulated {

struct AcceleratorGraph final : at::GraphImplInterface {
  explicit AcceleratorGraph(const at::GraphImplArgs&) {}
  void capture_begin(c10::MempoolId_t, at::GraphCaptureMode) override { graph.begin(); }
  void capture_end() override { graph.end(); }
  void instantiate() override {}
  void replay() override { graph.replay(); }
  void reset() override { graph.reset(); }
  c10::MempoolId_t pool() const override {
    return {0, static_cast<c10::CaptureId_t>(graph.number())};
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

  CapturedGraph graph;
};

// Pinned memory is plain memory here.
struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override { return c10::GetCPUAllocator()->allocate(nbytes); }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator host_allocator;

struct RegisterHostAllocator {
  RegisterHostAllocator() { at::setHostAllocator(c10::DeviceType::PrivateUse1, &host_allocator); }
} register_host_allocator;

}  // namespace simulated

namespace at {
// Looked up by the device's name in capitals, the one that device.py gives it.
REGISTER_GRAPH_IMPL(SIM, simulated::AcceleratorGraph);
}  // namespace at

#endif
