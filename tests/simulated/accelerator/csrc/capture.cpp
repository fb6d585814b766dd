// Capture and replay: the part of `Simulator` that records instead of doing.
//
// While a device is captured its kernels still run, since the host needs shapes and nothing else;
// what they write to memory from before the capture is put back at its end. Order is checked at
// each replay, when the recorded actions happen, on lanes of the graph's own.

#include <cstring>

#include "simulator.h"

namespace simulated {

bool Simulator::capturing(int device) {
  Lock lock(mutex_);
  return captures_[device] != nullptr;
}

bool Simulator::capturing(int device, int64_t stream) {
  Lock lock(mutex_);
  return captures_[device] != nullptr && captures_[device]->lanes.count(stream) != 0;
}

void Simulator::require_member(const Graph& graph, int64_t stream, const char* what) {
  if (graph.lanes.count(stream) == 0)
    throw Refusal(
        Error::OutsideCapture,
        std::string(what) + " on stream " + std::to_string(stream) + " of sim:" +
            std::to_string(graph.device) + " during a capture that this stream has not joined");
}

// Returns the lane of a stream in a capture; a stream joins by waiting for an event of the capture.
Lane Simulator::graph_lane(Graph& graph, int64_t stream) {
  auto found = graph.lanes.find(stream);
  if (found != graph.lanes.end()) return found->second;
  if (stream == 0)
    throw Refusal(
        Error::DefaultStreamCapture,
        "the default stream of sim:" + std::to_string(graph.device) + " cannot join a capture");
  return graph.lanes[stream] = new_lane(graph.device, stream, graph.number);
}

void Simulator::begin_capture(Graph& graph, int device, int64_t stream) {
  Lock lock(mutex_);
  if (captures_[device] != nullptr)
    throw Refusal(
        Error::NestedCapture, "sim:" + std::to_string(device) + " is being captured already");
  if (stream == 0)
    throw Refusal(
        Error::DefaultStreamCapture,
        "a capture needs a stream of its own, got the default stream of sim:" +
            std::to_string(device));
  if (graph.state != Graph::Empty)
    throw Refusal(
        Error::Capture, "this graph holds a capture already; make a new one, or reset it");
  graph.state = Graph::Capturing;
  graph.device = device;
  graph.number = ++graphs_;
  graph.origin = graph_lane(graph, stream);
  captures_[device] = &graph;
}

void Simulator::save(Graph& graph, const Access& access) {
  Block* block = memory_.find(access.begin);
  if (block == nullptr || block->pool == graph.number) return;
  const char* bytes = reinterpret_cast<const char*>(access.begin);
  graph.undo.emplace_back(access.begin, std::vector<char>(bytes, bytes + access.nbytes));
}

void Simulator::remember_for_undo(Graph& graph, const std::vector<Access>& accesses) {
  Lock lock(mutex_);
  for (const Access& access : accesses)
    if (access.writes) save(graph, access);
}

void Simulator::undo(Graph& graph) {
  for (auto saved = graph.undo.rbegin(); saved != graph.undo.rend(); ++saved)
    std::memcpy(reinterpret_cast<void*>(saved->first), saved->second.data(), saved->second.size());
  graph.undo.clear();
}

void Simulator::append(Graph& graph, Item item) {
  Lock lock(mutex_);
  graph.items.push_back(std::move(item));
}

void Simulator::abandon_capture(Graph& graph) {
  std::vector<Item> dropped;  // destroyed without the lock: items may own tensors
  {
    Lock lock(mutex_);
    if (graph.state == Graph::Capturing) {
      undo(graph);
      captures_[graph.device] = nullptr;
    }
    for (const auto& [stream, lane] : graph.lanes) spare_lanes_.push_back(lane);
    dropped.swap(graph.items);
    graph.lanes.clear();
    graph.launched.clear();
    graph.events = 0;
    graph.state = Graph::Empty;
  }
}

void Simulator::end_capture(Graph& graph) {
  std::string unjoined;
  {
    Lock lock(mutex_);
    if (graph.state != Graph::Capturing)
      throw Refusal(Error::Capture, "this graph is not capturing");
    const Clock& origin = lanes_[graph.origin].clock;
    for (const auto& [lane, tick] : graph.launched)
      if (!origin.knows(lane, tick))
        unjoined +=
            (unjoined.empty() ? "stream " : ", stream ") + std::to_string(lanes_[lane].stream);
    if (unjoined.empty()) {
      undo(graph);
      captures_[graph.device] = nullptr;
      graph.state = Graph::Ready;
    }
  }
  if (unjoined.empty()) return;
  int device = graph.device;
  abandon_capture(graph);
  throw Refusal(
      Error::UnjoinedStream,
      "the capture on sim:" + std::to_string(device) + " ended while work on " + unjoined +
          " was not joined to the stream it began on");
}

// Does the bookkeeping of one recorded action; the mutex is held.
void Simulator::step(const Item& item, std::vector<Clock>& events) {
  LaneState& lane = lanes_[item.lane];
  switch (item.type) {
    case Item::Record:
      events[item.event] = lane.clock;
      return;
    case Item::Wait:
      lane.clock.join(events[item.event]);
      return;
    case Item::Free: {
      Block* block = memory_.find(item.accesses[0].begin);
      check_free(*block, {item.lane, lane.tick, item.site}, lane.clock);
      return;
    }
    case Item::Call:
    case Item::Launch:
    case Item::Allocate:
      break;
  }
  Stamp stamp = advance(item.lane, item.site);
  if (item.type != Item::Allocate) schedules_[lane.device].launched(stamp, lane.clock);
  for (const Access& access : item.accesses) {
    Block* block = memory_.find(access.begin);
    // Memory of a graph, this one's or one it follows, is lent again only in captures of that
    // graph.
    if (block == nullptr || block->pool != 0) continue;
    if (!block->live || block->generation != access.generation)
      report(
          HazardKind::UseAfterFree, block->freed, stamp, *block, access.begin - block->base,
          access.begin - block->base + access.nbytes);
  }
  inspect(stamp, item.accesses);
}

void Simulator::replay(Graph& graph, int64_t stream, Site site) {
  std::vector<Clock> events(graph.events);
  Lane launching;
  {
    Lock lock(mutex_);
    if (graph.state != Graph::Ready)
      throw Refusal(Error::Capture, "replay needs a graph that was captured");
    if (captures_[graph.device] != nullptr)
      throw Refusal(
          Error::NestedCapture,
          "a graph is replayed on sim:" + std::to_string(graph.device) +
              " while this device is being captured");
    launching = eager_lane(graph.device, stream);
    Clock start = (advance(launching, site), lanes_[launching].clock);
    for (const auto& [unused, lane] : graph.lanes) lanes_[lane].clock.join(start);
  }
  for (const Item& item : graph.items) {
    {
      Lock lock(mutex_);
      step(item, events);
    }
    if (item.run) item.run();
    if (item.call) item.call(item.lane, item.site);
  }
  Lock lock(mutex_);
  for (const auto& [unused, lane] : graph.lanes) lanes_[launching].clock.join(lanes_[lane].clock);
}

}  // namespace simulated
