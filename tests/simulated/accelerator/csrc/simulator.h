// The simulated accelerator without torch: streams, events, memory, captures, and the check of
// every access.
//
// Work runs on the host when it is launched; what streams would do is kept as order only. A launch
// is stamped with its lane's tick, a wait joins clocks, and an access that the clock of its lane
// does not order after an earlier, conflicting one is a hazard: on a real device the two may
// overlap.
//
// One mutex guards the state. Nothing under it takes the GIL or runs a kernel, so threads that hold
// the GIL may wait for it.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"
#include "memory.h"
#include "schedule.h"

namespace simulated {

constexpr int kDevices = 8;
// of each priority and device; then the first is given out again
constexpr int kPooledStreams = 32;

// What the program did wrong. Becomes a typed Python error once no lock is held; see errors.cpp.
struct Refusal : std::runtime_error {
  Refusal(Error error, const std::string& sentence) : std::runtime_error(sentence), error(error) {}
  Error error;
};

struct Access {
  uintptr_t begin = 0;
  size_t nbytes = 0;
  bool writes = false;
  uint32_t generation = 0;  // of its block when a capture recorded it
};

struct Hazard {
  HazardKind kind;
  Stamp earlier;
  Stamp later;
  uintptr_t begin;
  uintptr_t end;
  uintptr_t block;
  int device;
  std::string labels;
  int64_t count = 1;
};

struct Event {
  bool recorded = false;
  int device = 0;
  Clock clock;
  Lane lane = 0;
  Tick tick = 0;   // of the last work before it
  int graph = 0;   // the capture it was recorded in, or 0
  int number = 0;  // among the events of that capture
};

// One recorded action. Replaying a graph means doing all of them again.
struct Item {
  enum Type { Launch, Record, Wait, Allocate, Free, Call };
  Type type;
  Lane lane = 0;
  Site site;
  std::vector<Access> accesses;
  std::function<void()> run;
  std::function<void(Lane, Site)> call;  // stamps its accesses itself: a collective
  int event = 0;
};

struct Graph {
  enum State { Empty, Capturing, Ready };
  State state = Empty;
  int number = 0;
  int device = 0;
  Lane origin = 0;
  int events = 0;
  std::map<int64_t, Lane> lanes;  // of the streams that have joined
  std::map<Lane, Tick> launched;  // the last work of each
  std::vector<Item> items;
  // Bytes from before the capture: capturing must leave memory as it was, because it does not
  // execute.
  std::vector<std::pair<uintptr_t, std::vector<char>>> undo;
};

class Simulator {
 public:
  static Simulator& get();

  // Streams and hosts.
  int64_t next_pooled_stream(int device, int priority);
  Lane eager_lane(int device, int64_t stream);
  std::string describe(Lane lane);
  void name_stream(int device, int64_t stream, const std::string& name);
  void set_host(int device, int host);

  // Events.
  void record(Event& event, int device, int64_t stream, Site site);
  void wait(const Event& event, int device, int64_t stream, Site site);

  // Host synchronization.
  void synchronize_stream(int device, int64_t stream);
  void synchronize_event(const Event& event);
  void synchronize_device(int device);

  // Memory.
  uintptr_t allocate(int device, int64_t stream, size_t nbytes, Site site);
  void free(uintptr_t base, Site site);
  void record_stream(uintptr_t address, int device, int64_t stream);
  MemoryStats stats(int device);
  void reset_peak(int device);
  void empty_cache(int device);

  // Capture and replay.
  bool capturing(int device);
  bool capturing(int device, int64_t stream);
  void begin_capture(Graph& graph, int device, int64_t stream);
  void end_capture(Graph& graph);
  void abandon_capture(Graph& graph);
  void replay(Graph& graph, int64_t stream, Site site);
  void append(Graph& graph, Item item);

  // Work. `begin` returns the lane to stamp accesses with and the graph that records, or none.
  struct Work {
    Stamp stamp;
    Graph* graph = nullptr;
  };
  Work begin(int device, int64_t stream, Site site, const char* what);
  void touch(const Work& work, std::vector<Access>& accesses);

  // Order between lanes, for collectives and copies between devices.
  Clock clock_of(Lane lane);
  void join(Lane lane, const Clock& clock);
  Stamp tick(Lane lane, Site site);
  void check(const Stamp& stamp, const std::vector<Access>& accesses);
  // Makes a captured write of an action that stamps itself forgettable.
  void remember_for_undo(Graph& graph, const std::vector<Access>& accesses);

  // Reports.
  std::vector<Hazard> hazards();
  void forget_hazards();
  void label(uintptr_t begin, size_t nbytes, const std::string& text);

  // What was launched, and in which order it may run; see schedule.h.
  void restart_schedules(bool keep_launches);
  uint64_t schedule_digest(int device);
  std::vector<Launched> launches(int device);

 private:
  using Lock = std::lock_guard<std::mutex>;
  struct LaneState {
    int device;
    int64_t stream;
    int graph;
    Tick tick;
    Clock clock;
    std::string name;
  };
  struct Label {
    uintptr_t end;
    std::string text;
  };

  Simulator();
  Lane new_lane(int device, int64_t stream, int graph);
  Lane graph_lane(Graph& graph, int64_t stream);
  void require_member(const Graph& graph, int64_t stream, const char* what);
  Stamp advance(Lane lane, Site site);
  void inspect(const Stamp& stamp, std::vector<Access> const& accesses);
  void report(
      HazardKind kind, const Stamp& earlier, const Stamp& later, const Block& block, size_t begin,
      size_t end);
  void save(Graph& graph, const Access& access);
  void undo(Graph& graph);
  void host_learns(int device, const Clock& clock);
  void refuse_sync(int device, const char* what);
  void check_free(Block& block, const Stamp& now, Clock known);
  void forget_labels(const Block& block);
  std::string labels_of(uintptr_t begin, uintptr_t end) const;
  void step(const Item& item, std::vector<Clock>& events);

  std::mutex mutex_;
  std::vector<LaneState> lanes_;
  std::map<std::pair<int, int64_t>, Lane> eager_;
  std::vector<Lane> spare_lanes_;
  std::array<std::array<int, 2>, kDevices> given_out_{};
  std::array<int, kDevices> host_of_{};
  std::map<int, Clock> hosts_;
  Memory memory_;
  std::array<Graph*, kDevices> captures_{};
  int graphs_ = 0;
  std::vector<Hazard> hazards_;
  std::map<uintptr_t, Label> labels_;
  std::array<Schedule, kDevices> schedules_;
};

}  // namespace simulated
