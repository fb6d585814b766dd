// The objects of the runtime, and what all of its files share. One lock guards them: `Call`.
#pragma once
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include "interface.h"

#define API extern "C" HOSTCUDA

namespace hostcuda {

// -- work that runs
// -------------------------------------------------------------------------------------------------

struct Item {
  uint64_t id;
  Work work;
  Body body;
  std::vector<std::shared_ptr<Item>> before;  // empty once it is done
  bool open = false;                          // its operator is still launching
  bool done = false;
};
using ItemPtr = std::shared_ptr<Item>;

// What has to be done first: at most one item of each stream.
using Point = std::vector<ItemPtr>;
void add(Point& point, const Point& other);

// -- work that is recorded
// ------------------------------------------------------------------------------------

struct Graph;

struct Node {
  Graph* graph;
  uint64_t id;
  Work work;
  std::vector<Node*> before;
};

// What graphs keep for a library that wants to know when they are gone.
using Kept = std::shared_ptr<void>;

struct Graph {
  uint64_t id;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<Kept> kept;
};

struct Exec {
  uint64_t id, graph;
  std::vector<Work> work;  // in the order of recording, which respects the edges
  std::vector<std::vector<size_t>> before;
  std::vector<Kept> kept;
  uint64_t launches = 0;
  bool alive = true;
};

struct Stream;

struct Capture {
  uint64_t id;
  Stream* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Graph* graph;
  bool broken = false;
  std::string why;
  std::set<Stream*> streams;
};

struct Stream {
  int index, device;
  unsigned flags;
  int priority;
  bool legacy;
  Point tail;  // before its next piece of work
  Capture* capture = nullptr;
  std::vector<Node*> nodes;  // the same, while it is captured
  int asked = 0;
  std::vector<Range> freed;  // by torch's allocator, since it last allocated for this stream

  bool blocking() const { return !legacy && !(flags & cudaStreamNonBlocking); }
};

struct Event {
  int device;
  unsigned flags;
  bool recorded = false;
  Point point;
  uint64_t capture = 0;  // the capture it was last recorded in
  std::vector<Node*> nodes;
  int asked = 0;
  std::chrono::steady_clock::time_point at;
};

struct Device {
  int fd = -1;
  uintptr_t base = 0;
  size_t total, span, used = 0;
  std::map<uintptr_t, size_t> free_ranges;
  Stream* legacy = nullptr;
};

struct Logged {
  uint64_t id;
  Work work;
  std::vector<uint64_t> before;
};

// In which legal order work runs.
enum class Order {
  host,    // as the host launches it, at once
  late,    // when something waits for it, and only what that needs
  random,  // likewise, and what is not ordered in an order drawn from a seed
};

struct State {
  State();
  std::recursive_mutex mutex;
  std::condition_variable_any changed;
  std::vector<Device> devices;
  std::map<uintptr_t, std::pair<size_t, int>> allocations;  // device memory: size, device
  std::map<uintptr_t, size_t> pinned;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::vector<Stream*> by_index;
  std::map<uint64_t, Capture*> captures;  // under way
  std::map<uint64_t, Graph*> graphs;
  std::vector<std::unique_ptr<Exec>> execs;
  std::unordered_map<const void*, const char*> kernels;  // by the address of the host function
  std::unordered_map<const void*, std::pair<void*, size_t>> variables;
  uint64_t ids = 0;

  bool has_values = true;
  // nothing has values, and work is over once it is launched: no order is kept
  bool only_host_time = false;
  Order order = Order::host;
  std::mt19937_64 random;
  int questions = 1;  // an event looks unfinished until it was asked so often
  std::map<uint64_t, ItemPtr> pending;
  std::unordered_map<const void*, ItemPtr> lines;  // the last item of each `Work::in_line`
  bool running = false;                            // some thread is in a body
  Point host;                                      // what the host has waited for

  std::vector<Logged> log;
  bool tracing = false;
  std::vector<std::string> findings;
  std::map<std::string, uint64_t> calls;
  std::map<uint64_t, std::pair<std::string, std::vector<Range>>> operators;  // by label
  FILE* out = nullptr;
  bool backtraces = false;
};
State& state();

// -- the calling thread
// ---------------------------------------------------------------------------------------

struct LaunchConfig {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

struct Thread {
  int device = 0;
  cudaError_t last = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  uint64_t label = 0;  // of the operator it is in
  Launched launched;
  ItemPtr last_item;
  Node* last_node = nullptr;
  Stream* last_stream = nullptr;  // that an operator has given work
  std::vector<ItemPtr> open;
  std::vector<LaunchConfig> pushed;
  int depth = 0;
  bool launches = false;  // work was launched in this call
};
Thread& self();

// Holds the lock for the time of an API call. What the call launches may run when the lock is free
// again: a body may call back into Python, or wait for another process.
class Call {
 public:
  explicit Call(const char* api);
  ~Call();
  const char* const api;
};

cudaError_t fail(const char* api, cudaError_t error, const char* why = "");
void print(const char* format, ...);
std::string quoted(const std::string& text);

#define ENTER() Call call_(__func__)
#define FAIL(...) return fail(call_.api, __VA_ARGS__)
#define TRY(expression)                                   \
  do {                                                    \
    if (cudaError_t error_ = (expression)) return error_; \
  } while (0)

// -- order (executor.cpp)
// -------------------------------------------------------------------------------------

// A stream's work begins after this point.
Point before_next(Stream* stream);
ItemPtr submit(Stream* stream, Work work, Point before);
// Blocks until all of it is done; the host knows so from then on. Without the lock.
void wait_for(const Point& point);
// Runs what can run without waiting; returns whether all of it is done. Without the lock.
bool try_for(const Point& point, bool is_waited_for);
void run_ready();

// -- streams (streams.cpp)
// ------------------------------------------------------------------------------------

Stream* find(cudaStream_t handle);
Stream* new_stream(int device, unsigned flags, int priority, bool legacy);
cudaError_t give(const char* api, Stream* stream, Work work);

// -- rules of capture (capture.cpp)
// ---------------------------------------------------------------------------

void invalidate(Capture* capture, const std::string& why);
cudaError_t unsafe(const char* api);
cudaError_t legacy_use(const char* api, Stream* stream);
cudaError_t device_wide(const char* api, int device);

// -- torch's symmetric memory (symmetric.cpp)
// ------------------------------------------------------------------------------

bool is_barrier(const char* kernel);
// What its launch starts; all barriers of the line run in the order of their launches.
std::function<Body()> barrier_of(void** args, const void** line);

// -- memory (memory.cpp)
// --------------------------------------------------------------------------------------

bool is_device_address(const void* pointer);
bool is_allocated(const void* pointer);
cudaError_t allocate(const char* api, void** out, size_t size, int device);
cudaError_t copy(const char* api, void* dst, const void* src, size_t size, Stream* stream);

}  // namespace hostcuda
