// One graph, as Python and torch.accelerator.Graph hold it.
#pragma once

#include "position.h"
#include "services.h"

namespace simulated {

class CapturedGraph {
 public:
  ~CapturedGraph() { reset(); }

  // Captures what is launched on the current stream of the current device, and on streams that join
  // it.
  void begin() {
    int device = current_device();
    told([&] { Simulator::get().begin_capture(graph_, device, current_stream(device)); });
    restore_generators_ = remember_generators(device);
  }

  void end() {
    auto restore = std::move(restore_generators_);
    told([&] { Simulator::get().end_capture(graph_); });
    if (restore) restore();
  }

  // Gives up a capture under way, or forgets one that is complete.
  void reset() {
    Simulator::get().abandon_capture(graph_);
    if (restore_generators_) restore_generators_();
    restore_generators_ = nullptr;
  }

  // Runs on the current stream of the graph's device.
  void replay() {
    OnDevice on(graph_.device);
    Site site = site_of("replay");
    told([&] { Simulator::get().replay(graph_, current_stream(graph_.device), site); });
  }

  size_t size() const { return graph_.items.size(); }
  bool capturing() const { return graph_.state == Graph::Capturing; }
  int number() const { return graph_.number; }

 private:
  Graph graph_;
  std::function<void()> restore_generators_;
};

}  // namespace simulated
