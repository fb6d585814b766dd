// The order in which work runs.
//
// Work depends on work: on what its stream was given before, on the events that its stream waited
// for, on what the host had waited for when it was launched. Any order that respects this is one
// that a device may take.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "state.h"

namespace hostcuda {

void add(Point& point, const Point& other) {
  for (const ItemPtr& item : other) {
    auto same = std::find_if(point.begin(), point.end(), [&](const ItemPtr& each) {
      return each->work.stream == item->work.stream;
    });
    if (same == point.end()) point.push_back(item);
    else if ((*same)->id < item->id) *same = item;
  }
}

Point before_next(Stream* stream) {
  Point before = stream->tail;
  if (stream->legacy) {  // waits for all blocking streams of the device, and they wait for it
    for (Stream* each : state().streams)
      if (each->device == stream->device && each->blocking()) add(before, each->tail);
  } else if (stream->blocking()) {
    add(before, state().devices[stream->device].legacy->tail);
  }
  add(before, state().host);
  return before;
}

// What stands for work where memory has no values: it moves nothing and asks no other rank. The
// host reads zeros.
static std::function<Body()> without_values(const Work& work) {
  return doing([ranges = work.ranges] {
    for (const Range& each : ranges)
      if (each.write && !is_device_address(each.ptr))
        memset(const_cast<void*>(each.ptr), 0, each.size);
  });
}

ItemPtr submit(Stream* stream, Work work, Point before) {
  State& s = state();
  if (s.only_host_time && !s.tracing) {
    static const ItemPtr done = [] {
      auto item = std::make_shared<Item>();
      item->done = true;
      return item;
    }();
    if (work.start) without_values(work)()();
    return done;
  }
  auto item = std::make_shared<Item>();
  item->id = ++s.ids;
  work.stream = stream->index;
  if (s.tracing) {
    std::vector<uint64_t> ids;
    for (const ItemPtr& each : before) ids.push_back(each->id);
    s.log.push_back({item->id, work, std::move(ids)});
    s.log.back().work.start = nullptr;  // or the log keeps what it holds
  }
  if (work.in_line) {
    ItemPtr& last = s.lines[work.in_line];
    if (last && !last->done) before.push_back(last);
    last = item;
  }
  if (work.start && !s.has_values) work.start = without_values(work);
  if (work.start) item->body = work.start();
  work.start = nullptr;
  item->work = std::move(work);
  for (ItemPtr& each : before)
    if (!each->done) item->before.push_back(std::move(each));
  s.pending.emplace(item->id, item);
  self().launches = true;
  return item;
}

namespace {

// Everything that has to be done for `goals`, in the order in which to do it.
std::vector<ItemPtr> plan(Point goals) {
  State& s = state();
  std::vector<ItemPtr> order;
  std::set<Item*> seen;
  struct Frame {
    ItemPtr item;
    std::vector<ItemPtr> before;
  };
  std::vector<Frame> stack;
  auto arranged = [&](std::vector<ItemPtr> items) {  // taken from the back
    std::sort(items.begin(), items.end(), [](const ItemPtr& a, const ItemPtr& b) {
      return a->id < b->id;
    });
    if (s.order == Order::host) std::reverse(items.begin(), items.end());
    if (s.order == Order::random) std::shuffle(items.begin(), items.end(), s.random);
    return items;
  };
  goals = arranged(std::move(goals));
  while (!goals.empty()) {
    ItemPtr goal = goals.back();
    goals.pop_back();
    if (goal->done || !seen.insert(goal.get()).second) continue;
    stack.push_back({goal, arranged(goal->before)});
    while (!stack.empty()) {
      Frame& top = stack.back();
      if (top.before.empty()) {
        order.push_back(top.item);
        stack.pop_back();
        continue;
      }
      ItemPtr next = top.before.back();
      top.before.pop_back();
      if (!next->done && seen.insert(next.get()).second)
        stack.push_back({next, arranged(next->before)});
    }
  }
  return order;
}

bool is_ready(const Item& item) {
  return std::all_of(
      item.before.begin(), item.before.end(), [](const ItemPtr& each) { return each->done; });
}

bool sleeps(const Item& item) { return item.work.name.find("spin_kernel") != std::string::npos; }

// Lets other threads have Python's lock, if this one holds it: many of torch's calls keep it.
class WithoutPython {
 public:
  WithoutPython() {
    static const auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto let_go =
        reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (holds && holds()) thread_ = let_go();
  }
  ~WithoutPython() {
    static const auto take =
        reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (thread_) take(thread_);
  }

 private:
  void* thread_ = nullptr;
};

// Waits until no thread is in a body, which may be written in Python. `lock` is held again then.
void wait_for_body(std::unique_lock<std::recursive_mutex>& lock) {
  State& s = state();
  while (s.running) {
    lock.unlock();
    {
      WithoutPython let_go;
      std::unique_lock<std::recursive_mutex> again(s.mutex);
      s.changed.wait(again, [&] { return !s.running; });
    }
    lock.lock();
  }
}

// Runs what is ready of a plan; returns whether anything was done. If nobody waits for it, a stream
// that sleeps (torch.cuda._sleep) goes on sleeping, and an operator that is still launching is let
// be.
bool run(const std::vector<ItemPtr>& plan, bool is_waited_for) {
  State& s = state();
  bool progress = false;
  for (const ItemPtr& item : plan) {
    Body over;  // destroyed without the lock: it may hold tensors, whose end may need Python's
    std::unique_lock<std::recursive_mutex> lock(s.mutex);
    wait_for_body(lock);
    if (item->done || ((item->open || sleeps(*item)) && !is_waited_for) || !is_ready(*item))
      continue;
    bool done = true;
    if (item->body) {
      s.running = true;
      lock.unlock();
      done = item->body();
      lock.lock();
      s.running = false;
    }
    if (done) {
      item->done = progress = true;
      over.swap(item->body);
      item->before.clear();
      s.pending.erase(item->id);
    }
    s.changed.notify_all();
  }
  return progress;
}

bool all_done(const Point& point) {
  return std::all_of(point.begin(), point.end(), [](const ItemPtr& each) { return each->done; });
}

}  // namespace

bool try_for(const Point& point, bool is_waited_for) {
  std::vector<ItemPtr> order;
  {
    std::lock_guard<std::recursive_mutex> lock(state().mutex);
    order = plan(point);
  }
  if (!order.empty()) run(order, is_waited_for);
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  return all_done(point);
}

void wait_for(const Point& point) {
  State& s = state();
  if (self().label && !point.empty()) self().launched.waited = true;
  while (true) {
    std::vector<ItemPtr> order;
    {
      std::lock_guard<std::recursive_mutex> lock(s.mutex);
      if (all_done(point)) {
        add(s.host, point);
        return;
      }
      order = plan(point);
    }
    if (!run(order, true)) usleep(20);
  }
}

void run_ready() {
  std::vector<ItemPtr> all;
  {
    std::lock_guard<std::recursive_mutex> lock(state().mutex);
    for (auto& [id, item] : state().pending) all.push_back(item);
  }
  if (!all.empty()) run(all, false);
}

void advance(const void* line) {
  ItemPtr first;
  {
    std::lock_guard<std::recursive_mutex> lock(state().mutex);
    for (auto& [id, item] : state().pending)
      if (item->work.in_line == line) {
        first = item;
        break;
      }
  }
  if (first) try_for({first}, true);  // a peer waits for it
}

void finish_all(int limit_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit_ms);
  Point all;
  {
    std::lock_guard<std::recursive_mutex> lock(state().mutex);
    for (Stream* each : state().streams)
      all.insert(all.end(), each->tail.begin(), each->tail.end());
  }
  while (!try_for(all, true) && std::chrono::steady_clock::now() < until) usleep(100);
}

// -- operators
// -------------------------------------------------------------------------------------------------

void begin_operator(uint64_t label) {
  self().label = label;
  self().launched = {};
  self().last_item = nullptr;
  self().last_node = nullptr;
}

Launched launched() { return self().launched; }

void finish_launched() {
  Point point;
  {
    std::lock_guard<std::recursive_mutex> lock(state().mutex);
    if (self().last_stream) point = self().last_stream->tail;
  }
  wait_for(point);
}

bool wants_ranges() { return state().tracing; }

void end_operator(const char* name, std::vector<Range> ranges, std::function<Body()> start) {
  Call call("operator");
  Thread& me = self();
  if (name && (state().tracing || me.launched.captured))
    state().operators[me.label] = {name, std::move(ranges)};
  if (start && me.last_node) me.last_node->work.start = start;
  else if (start && me.last_item && !me.last_item->done) {
    me.last_item->body = [first = std::move(me.last_item->body), body = start()] {
      return (!first || first()) && body();
    };
  }
  for (const ItemPtr& item : me.open) item->open = false;
  me.open.clear();
  me.last_item = nullptr;
  me.label = 0;
  me.launches = true;
}

}  // namespace hostcuda
