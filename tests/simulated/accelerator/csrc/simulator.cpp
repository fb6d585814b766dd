#include "simulator.h"

namespace simulated {

Simulator& Simulator::get() {
  static Simulator* simulator = new Simulator();  // outlives every tensor
  return *simulator;
}

Simulator::Simulator() {
  for (int device = 0; device < kDevices; ++device) host_of_[device] = 0;
}

// -- streams and hosts
// --------------------------------------------------------------------------------------

Lane Simulator::new_lane(int device, int64_t stream, int graph) {
  if (!spare_lanes_.empty() && graph != 0) {  // its ticks go on, so nothing old looks new
    Lane lane = spare_lanes_.back();
    spare_lanes_.pop_back();
    lanes_[lane].device = device;
    lanes_[lane].stream = stream;
    lanes_[lane].graph = graph;
    return lane;
  }
  lanes_.push_back({device, stream, graph, 0, {}, ""});
  return static_cast<Lane>(lanes_.size() - 1);
}

Lane Simulator::eager_lane(int device, int64_t stream) {
  auto found = eager_.find({device, stream});
  if (found != eager_.end()) return found->second;
  return eager_[{device, stream}] = new_lane(device, stream, 0);
}

int64_t Simulator::next_pooled_stream(int device, int priority) {
  Lock lock(mutex_);
  int high = priority < 0;
  int turn = given_out_[device][high]++ % kPooledStreams;
  return 1 + high * kPooledStreams + turn;
}

std::string Simulator::describe(Lane lane) {
  Lock lock(mutex_);
  const LaneState& state = lanes_[lane];
  auto eager = eager_.find({state.device, state.stream});
  const std::string& name = eager == eager_.end() ? state.name : lanes_[eager->second].name;
  std::string text =
      state.stream == 0 ? "default stream" : "stream " + std::to_string(state.stream);
  text += " of sim:" + std::to_string(state.device);
  if (!name.empty()) text += " (" + name + ")";
  if (state.graph != 0) text += " in a graph";
  return text;
}

void Simulator::name_stream(int device, int64_t stream, const std::string& name) {
  Lock lock(mutex_);
  lanes_[eager_lane(device, stream)].name = name;
}

void Simulator::set_host(int device, int host) {
  Lock lock(mutex_);
  hosts_[host].join(hosts_[host_of_[device]]);  // it knows what its predecessor knew
  host_of_[device] = host;
}

void Simulator::host_learns(int device, const Clock& clock) {
  Clock& host = hosts_[host_of_[device]];
  host.join(clock);
  memory_.take_back(device, host);
}

// -- events
// -------------------------------------------------------------------------------------------------

void Simulator::record(Event& event, int device, int64_t stream, Site site) {
  Lock lock(mutex_);
  Graph* graph = captures_[device];
  event.recorded = true;
  event.device = device;
  event.graph = 0;
  if (graph != nullptr && graph->lanes.count(stream) != 0) {
    Lane lane = graph->lanes[stream];
    event.graph = graph->number;
    event.number = graph->events++;
    event.clock = lanes_[lane].clock;
    graph->items.push_back({Item::Record, lane, site, {}, {}, {}, event.number});
    return;
  }
  LaneState& lane = lanes_[eager_lane(device, stream)];
  lane.clock.join(hosts_[host_of_[device]]);
  event.clock = lane.clock;
  event.lane = eager_lane(device, stream);
  event.tick = lane.tick;
}

void Simulator::wait(const Event& event, int device, int64_t stream, Site site) {
  Lock lock(mutex_);
  if (!event.recorded)
    throw Refusal(
        Error::UnrecordedEvent,
        "expected an event that was recorded, got one that never was: the wait would order "
        "nothing");
  Graph* graph = captures_[device];
  bool member = graph != nullptr && graph->lanes.count(stream) != 0;
  if (event.graph == 0) {
    if (member)
      throw Refusal(
          Error::ForeignEvent,
          "a captured stream waits for an event that was recorded outside of the capture");
    Lane lane = eager_lane(device, stream);
    lanes_[lane].clock.join(event.clock);
    schedules_[device].waited(lane, lanes_[lane].tick, event.lane, event.tick);
    return;
  }
  if (graph == nullptr || graph->number != event.graph)
    throw Refusal(
        Error::ForeignEvent,
        "a stream outside of the capture waits for an event that was recorded inside one");
  Lane lane = graph_lane(*graph, stream);
  lanes_[lane].clock.join(event.clock);
  graph->items.push_back({Item::Wait, lane, site, {}, {}, {}, event.number});
}

// -- host synchronization
// -----------------------------------------------------------------------------------

void Simulator::refuse_sync(int device, const char* what) {
  if (captures_[device] != nullptr)
    throw Refusal(
        Error::HostSyncInCapture,
        std::string(what) + " makes the host wait for sim:" + std::to_string(device) +
            ", which is being captured");
}

void Simulator::synchronize_stream(int device, int64_t stream) {
  Lock lock(mutex_);
  refuse_sync(device, "a stream synchronization or query, or a value read back,");
  host_learns(device, lanes_[eager_lane(device, stream)].clock);
}

void Simulator::synchronize_event(const Event& event) {
  Lock lock(mutex_);
  if (!event.recorded)
    throw Refusal(
        Error::UnrecordedEvent, "expected an event that was recorded, got one that never was");
  refuse_sync(event.device, "an event synchronization or query");
  if (event.graph != 0)
    throw Refusal(
        Error::ForeignEvent, "the host waits for an event that was recorded inside a capture");
  host_learns(event.device, event.clock);
}

void Simulator::synchronize_device(int device) {
  Lock lock(mutex_);
  refuse_sync(device, "a device synchronization");
  Clock all;
  for (const LaneState& lane : lanes_)
    if (lane.device == device) all.join(lane.clock);
  host_learns(device, all);
}

// -- work
// -------------------------------------------------------------------------------------------------

Stamp Simulator::advance(Lane lane, Site site) {
  LaneState& state = lanes_[lane];
  state.clock.set(lane, ++state.tick);
  if (state.graph == 0) state.clock.join(hosts_[host_of_[state.device]]);
  return {lane, state.tick, site};
}

Stamp Simulator::tick(Lane lane, Site site) {
  Lock lock(mutex_);
  return advance(lane, site);
}

Simulator::Work Simulator::begin(int device, int64_t stream, Site site, const char* what) {
  Lock lock(mutex_);
  Graph* graph = captures_[device];
  if (graph == nullptr) {
    Stamp stamp = advance(eager_lane(device, stream), site);
    schedules_[device].launched(stamp, lanes_[stamp.lane].clock);
    return {stamp, nullptr};
  }
  require_member(*graph, stream, what);
  Lane lane = graph->lanes[stream];
  Stamp stamp = advance(lane, site);
  graph->launched[lane] = stamp.tick;
  return {stamp, graph};
}

void Simulator::touch(const Work& work, std::vector<Access>& accesses) {
  Lock lock(mutex_);
  if (work.graph == nullptr) {
    inspect(work.stamp, accesses);
    return;
  }
  for (Access& access : accesses) {
    Block* block = memory_.find(access.begin);
    access.generation = block == nullptr ? 0 : block->generation;
    if (access.writes) save(*work.graph, access);
  }
}

void Simulator::check(const Stamp& stamp, const std::vector<Access>& accesses) {
  Lock lock(mutex_);
  inspect(stamp, accesses);
}

Clock Simulator::clock_of(Lane lane) {
  Lock lock(mutex_);
  return lanes_[lane].clock;
}

void Simulator::join(Lane lane, const Clock& clock) {
  Lock lock(mutex_);
  lanes_[lane].clock.join(clock);
}

// Reads first: an op that reads what it then overwrites is told by its read.
void Simulator::inspect(const Stamp& stamp, const std::vector<Access>& accesses) {
  const Clock& known = lanes_[stamp.lane].clock;
  for (bool writes : {false, true})
    for (const Access& access : accesses) {
      Block* block = access.writes == writes ? memory_.find(access.begin) : nullptr;
      if (block == nullptr) continue;
      size_t begin = access.begin - block->base;
      block->shadow.touch(
          begin, begin + access.nbytes, writes, stamp, known,
          [&](HazardKind kind, const Stamp& earlier, size_t from, size_t to) {
            report(kind, earlier, stamp, *block, from, to);
          });
    }
}

// -- memory
// -------------------------------------------------------------------------------------------------

uintptr_t Simulator::allocate(int device, int64_t stream, size_t nbytes, Site site) {
  Lock lock(mutex_);
  Graph* graph = captures_[device];
  Lane lane;
  if (graph == nullptr) {
    lane = eager_lane(device, stream);
    memory_.take_back(device, hosts_[host_of_[device]]);
  } else {
    require_member(*graph, stream, "an allocation");
    lane = graph->lanes[stream];
  }
  Block* block = memory_.lend(nbytes, device, stream, lane, graph == nullptr ? 0 : graph->number);
  // Whoever had the block before may still be at work on this lane: a first use elsewhere must come
  // after it.
  std::vector<Access> whole = {{block->base, block->nbytes, true, block->generation}};
  Stamp stamp = advance(lane, site);
  if (graph == nullptr) inspect(stamp, whole);
  else graph->items.push_back({Item::Allocate, lane, site, whole, {}, {}, 0});
  return block->base;
}

void Simulator::check_free(Block& block, const Stamp& now, Clock known) {
  known.join(hosts_[host_of_[block.device]]);
  // A recorded block is lent again when what was launched there so far is done, and so what that
  // waited for.
  for (Lane lane : block.recorded) known.join(lanes_[lane].clock);
  block.shadow.unordered(
      known, [&](HazardKind kind, const Stamp& earlier, size_t begin, size_t end) {
        if (block.recorded.count(earlier.lane) == 0) report(kind, earlier, now, block, begin, end);
      });
  block.shadow = Shadow();  // one mistake, one report: the block's next user is not blamed as well
}

void Simulator::free(uintptr_t base, Site site) {
  Lock lock(mutex_);
  Block* block = memory_.find(base);
  if (block == nullptr) return;
  Stamp now{block->owner, lanes_[block->owner].tick, site};
  block->freed = now;
  Clock recorded;
  for (Lane lane : block->recorded) recorded.join(lanes_[lane].clock);
  Graph* graph = captures_[block->device];
  if (block->pool == 0) check_free(*block, now, lanes_[block->owner].clock);
  else if (graph != nullptr && graph->number == block->pool)
    graph->items.push_back(
        {Item::Free, block->owner, site, {{base, block->nbytes, false, 0}}, {}, {}, 0});
  forget_labels(*block);
  memory_.give_back(block, recorded);
}

void Simulator::record_stream(uintptr_t address, int device, int64_t stream) {
  Lock lock(mutex_);
  Block* block = memory_.find(address);
  if (block == nullptr) return;
  if (block->device != device)
    throw Refusal(
        Error::OtherDevice,
        "record_stream: expected a stream of sim:" + std::to_string(block->device) +
            ", where the memory is, got one of sim:" + std::to_string(device));
  Graph* graph = captures_[device];
  bool member = graph != nullptr && graph->lanes.count(stream) != 0;
  Lane lane = member ? graph->lanes[stream] : eager_lane(device, stream);
  if (lane != block->owner) block->recorded.insert(lane);
}

MemoryStats Simulator::stats(int device) {
  Lock lock(mutex_);
  return memory_.stats(device);
}

void Simulator::reset_peak(int device) {
  Lock lock(mutex_);
  memory_.stats(device).peak = memory_.stats(device).live;
}

void Simulator::empty_cache(int device) {
  synchronize_device(device);  // as giving memory back to a driver does
  Lock lock(mutex_);
  memory_.take_back(device, hosts_[host_of_[device]]);
  memory_.empty(device);
}

// -- reports
// -------------------------------------------------------------------------------------------------

// One hazard for each pair of places in the program; what comes again is counted, not repeated.
void Simulator::report(
    HazardKind kind, const Stamp& earlier, const Stamp& later, const Block& block, size_t begin,
    size_t end) {
  for (Hazard& known : hazards_) {
    bool same_sites = known.earlier.lane == earlier.lane && known.later.lane == later.lane &&
        known.earlier.site == earlier.site && known.later.site == later.site;
    if (!same_sites) continue;
    bool same_launches = known.earlier.tick == earlier.tick && known.later.tick == later.tick;
    if (same_launches && known.block == block.base) {
      known.begin = std::min(known.begin, block.base + begin);
      known.end = std::max(known.end, block.base + end);
      known.labels = labels_of(known.begin, known.end);
      return;  // also when it both reads and overwrites: the read was told
    }
    if (known.kind == kind) {
      if (known.later.tick != later.tick) known.count++;
      return;
    }
  }
  uintptr_t from = block.base + begin, to = block.base + end;
  hazards_.push_back(
      {kind, earlier, later, from, to, block.base, block.device, labels_of(from, to)});
}

std::vector<Hazard> Simulator::hazards() {
  Lock lock(mutex_);
  return hazards_;
}

void Simulator::forget_hazards() {
  Lock lock(mutex_);
  hazards_.clear();
}

void Simulator::restart_schedules(bool keep_launches) {
  Lock lock(mutex_);
  for (Schedule& schedule : schedules_) schedule.restart(keep_launches);
}

uint64_t Simulator::schedule_digest(int device) {
  Lock lock(mutex_);
  return schedules_[device].digest();
}

std::vector<Launched> Simulator::launches(int device) {
  Lock lock(mutex_);
  return schedules_[device].launches();
}

void Simulator::label(uintptr_t begin, size_t nbytes, const std::string& text) {
  Lock lock(mutex_);
  labels_[begin] = {begin + nbytes, text};
}

void Simulator::forget_labels(const Block& block) {
  labels_.erase(labels_.lower_bound(block.base), labels_.lower_bound(block.base + block.nbytes));
}

std::string Simulator::labels_of(uintptr_t begin, uintptr_t end) const {
  std::string text;
  int count = 0;
  for (const auto& [from, label] : labels_) {
    if (from >= end) break;
    if (label.end <= begin || ++count > 3) continue;
    text += (text.empty() ? "" : ", ") + label.text;
  }
  if (count > 3) text += " and " + std::to_string(count - 3) + " more";
  return text;
}

}  // namespace simulated
