// Streams and events.
#include <algorithm>

#include "state.h"

namespace hostcuda {

Stream* new_stream(int device, unsigned flags, int priority, bool legacy) {
  auto* s = new Stream{int(state().by_index.size()), device, flags, priority, legacy};
  state().by_index.push_back(s);
  state().streams.insert(s);
  return s;
}

static Stream* legacy_of(int device) {
  Stream*& legacy = state().devices[device].legacy;
  if (!legacy) legacy = new_stream(device, cudaStreamDefault, 0, true);
  return legacy;
}

Stream* find(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return legacy_of(self().device);
  auto* as_stream = reinterpret_cast<Stream*>(handle);
  return state().streams.count(as_stream) ? as_stream : nullptr;
}

static Event* find_event(cudaEvent_t handle) {
  auto* e = reinterpret_cast<Event*>(handle);
  return state().events.count(e) ? e : nullptr;
}

static Capture* capture_of(const Event* e) {
  auto found = state().captures.find(e->capture);
  return found == state().captures.end() ? nullptr : found->second;
}

// Runs the work, or records it if the stream is capturing.
cudaError_t give(const char* api, Stream* stream, Work work) {
  if (!stream) return fail(api, cudaErrorInvalidResourceHandle, "unknown stream");
  TRY(legacy_use(api, stream));
  legacy_of(stream->device);
  Thread& me = self();
  work.stream = stream->index;
  work.label = me.label;
  if (work.computes) me.launched.computes = true;
  else if (me.label) work.start = nullptr;  // its values are the operator's
  if (Capture* capture = stream->capture) {
    if (capture->broken) return fail(api, cudaErrorStreamCaptureInvalidated);
    auto node =
        std::make_unique<Node>(Node{capture->graph, ++state().ids, std::move(work), stream->nodes});
    stream->nodes = {node.get()};
    me.last_node = node.get();
    ++me.launched.captured;
    me.launched.graph = capture->graph->id;
    capture->graph->nodes.push_back(std::move(node));
    return cudaSuccess;
  }
  for (auto& [id, capture] : state().captures)
    if (capture->thread == std::this_thread::get_id())
      finding(
          "not captured: " + work.kind + " " + work.name + " on stream " +
          std::to_string(stream->index) + " ran while its thread captures on stream " +
          std::to_string(capture->origin->index));
  ItemPtr item = submit(stream, std::move(work), before_next(stream));
  stream->tail = {item};
  ++me.launched.eager;
  if (me.label) {
    me.last_stream = stream;
    item->open = true;
    me.open.push_back(item);
    me.last_item = item;
  }
  return cudaSuccess;
}

cudaError_t give(Work work, cudaStream_t stream) {
  Call call("give");
  ++state().calls[work.kind];
  Stream* found = find(stream);
  const std::string name = work.name;
  return give(name.c_str(), found, std::move(work));
}

// The host is about to wait for a stream or to ask about it.
static cudaError_t require_not_capturing(const char* api, Stream* s) {
  if (!s) return fail(api, cudaErrorInvalidResourceHandle, "unknown stream");
  if (s->capture) {
    if (s->capture->broken) return fail(api, cudaErrorStreamCaptureInvalidated);
    invalidate(s->capture, std::string(api) + " of a capturing stream");
    return fail(api, cudaErrorStreamCaptureUnsupported, "the stream is capturing");
  }
  TRY(legacy_use(api, s));
  return unsafe(api);
}

static cudaError_t require_not_captured(const char* api, Event* e) {
  if (!e) return fail(api, cudaErrorInvalidResourceHandle, "unknown event");
  if (e->capture) {
    Capture* capture = capture_of(e);
    if (!capture) return fail(api, cudaErrorInvalidValue, "recorded in a capture that has ended");
    invalidate(capture, std::string(api) + " of a captured event");
    return fail(api, cudaErrorCapturedEvent);
  }
  return unsafe(api);
}

// Everything a stream has been given, for the host.
static Point all_of(Stream* s) {
  Point point = s->tail;
  if (s->legacy)
    for (Stream* each : state().streams)
      if (each->device == s->device && each->blocking()) add(point, each->tail);
  return point;
}

constexpr int PATIENCE = 50;

// Answers whether a point has been reached, at the earliest at the so many-th question.
static cudaError_t answer(const char* api, const Point& point, int& asked) {
  const bool known =
      std::all_of(point.begin(), point.end(), [](const ItemPtr& each) { return each->done; });
  if (!known) {
    const bool often = ++asked >= PATIENCE;  // a sleeping stream wakes up one day
    if (asked < state().questions || !try_for(point, often)) return self().last = cudaErrorNotReady;
  }
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  asked = 0;
  add(state().host, point);
  return cudaSuccess;
}

}  // namespace hostcuda

using namespace hostcuda;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  ENTER();
  find(nullptr);
  *out = reinterpret_cast<cudaStream_t>(
      new_stream(self().device, flags, std::min(0, std::max(-5, priority)), false));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* out) {
  return cudaStreamCreateWithPriority(out, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER();
  Stream* s = find(stream);
  if (!s || s->legacy) FAIL(cudaErrorInvalidResourceHandle);
  if (s->capture) {
    invalidate(s->capture, "cudaStreamDestroy of a capturing stream");
    FAIL(cudaErrorStreamCaptureUnsupported);
  }
  state().streams.erase(s);  // its work goes on, and events may speak of it
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  ENTER();
  Stream* s = find(stream);
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  return *priority = s->priority, cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  ENTER();
  Stream* s = find(stream);
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  return *flags = s->flags, cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Point point;
  {
    ENTER();
    Stream* s = find(stream);
    TRY(require_not_capturing(call_.api, s));
    point = all_of(s);
  }
  return wait_for(point), cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Point point;
  Stream* s;
  {
    ENTER();
    s = find(stream);
    TRY(require_not_capturing(call_.api, s));
    point = all_of(s);
  }
  return answer("cudaStreamQuery", point, s->asked);
}
API cudaError_t cudaDeviceSynchronize() {
  Point point;
  {
    ENTER();
    TRY(device_wide(call_.api, self().device));
    TRY(unsafe(call_.api));
    for (Stream* each : state().by_index)
      if (each->device == self().device) add(point, each->tail);
  }
  return wait_for(point), cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  ENTER();
  auto* e = new Event{self().device, flags};
  state().events.insert(e);
  *out = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER();
  Event* e = find_event(event);
  if (!e) FAIL(cudaErrorInvalidResourceHandle);
  state().events.erase(e);
  delete e;
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  ENTER();
  Event* e = find_event(event);
  Stream* s = find(stream);
  if (!e || !s) FAIL(cudaErrorInvalidResourceHandle);
  if (e->device != s->device)
    FAIL(cudaErrorInvalidResourceHandle, "event and stream of two devices");
  TRY(legacy_use(call_.api, s));
  if (s->capture) {
    if (s->capture->broken) FAIL(cudaErrorStreamCaptureInvalidated);
    if (flags & cudaEventRecordExternal)
      return give(call_.api, s, Work{"event record", "external"});
    e->capture = s->capture->id;
    e->nodes = s->nodes;
    e->recorded = true;
    return cudaSuccess;
  }
  e->capture = 0;
  e->nodes.clear();
  e->recorded = true;
  e->point = all_of(s);
  e->asked = 0;
  e->at = std::chrono::steady_clock::now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  ENTER();
  Event* e = find_event(event);
  Stream* s = find(stream);
  if (!e || !s) FAIL(cudaErrorInvalidResourceHandle);
  TRY(legacy_use(call_.api, s));
  Capture* of_event = capture_of(e);
  if (s->capture) {
    if (s->capture->broken) FAIL(cudaErrorStreamCaptureInvalidated);
    if (flags & cudaEventWaitExternal) return give(call_.api, s, Work{"event wait", "external"});
    if (!of_event) {
      invalidate(
          s->capture,
          e->capture ? "wait for an event of another capture, which has ended"
                     : "wait for an event that was not recorded in the capture");
      FAIL(cudaErrorStreamCaptureIsolation);
    }
    if (of_event != s->capture) {
      invalidate(s->capture, "wait for an event of another capture");
      invalidate(of_event, "its event was waited for in another capture");
      FAIL(cudaErrorStreamCaptureMerge);
    }
    for (Node* node : e->nodes)
      if (std::find(s->nodes.begin(), s->nodes.end(), node) == s->nodes.end())
        s->nodes.push_back(node);
    return cudaSuccess;
  }
  if (of_event) {  // the stream joins the capture
    if (of_event->broken) FAIL(cudaErrorStreamCaptureInvalidated);
    if (s->legacy) {
      invalidate(of_event, "the legacy stream would have to join it");
      FAIL(cudaErrorStreamCaptureImplicit);
    }
    s->capture = of_event;
    s->nodes = e->nodes;
    of_event->streams.insert(s);
    return cudaSuccess;
  }
  if (e->capture) FAIL(cudaErrorInvalidValue, "recorded in a capture that has ended");
  if (e->recorded) add(s->tail, e->point);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Point point;
  Event* e;
  {
    ENTER();
    e = find_event(event);
    TRY(require_not_captured(call_.api, e));
    point = e->point;
  }
  return answer("cudaEventQuery", point, e->asked);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Point point;
  {
    ENTER();
    Event* e = find_event(event);
    TRY(require_not_captured(call_.api, e));
    point = e->point;
  }
  return wait_for(point), cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  ENTER();
  Event *a = find_event(start), *b = find_event(end);
  if (!a || !b || !a->recorded || !b->recorded || (a->flags | b->flags) & cudaEventDisableTiming)
    FAIL(cudaErrorInvalidResourceHandle);
  if (a->capture || b->capture) FAIL(cudaErrorCapturedEvent);
  for (Event* e : {a, b})
    for (const ItemPtr& item : e->point)
      if (!item->done) FAIL(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(b->at - a->at).count();
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER();
  Work work{"host"};
  work.start = doing([=] { function(data); });
  return give(call_.api, find(stream), std::move(work));
}
API cudaError_t
cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  ENTER();
  Stream* s = find(stream);
  if (s && s->capture) {
    invalidate(s->capture, "cudaStreamAddCallback");
    FAIL(cudaErrorStreamCaptureUnsupported);
  }
  Work work{"host", "callback"};
  work.start = doing([=] { callback(stream, cudaSuccess, data); });
  return give(call_.api, s, std::move(work));
}
