// Stream capture: CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture", and the
// reference of cudaStreamBeginCapture, cudaThreadExchangeStreamCaptureMode, cudaStreamEndCapture
// and of the error codes.
#include <algorithm>

#include "state.h"

namespace hostcuda {

void invalidate(Capture* capture, const std::string& why) {
  if (!capture->broken) finding("capture " + std::to_string(capture->id) + " invalidated: " + why);
  capture->broken = true;
  if (capture->why.empty()) capture->why = why;
}

// A potentially unsafe call: the reference of cudaThreadExchangeStreamCaptureMode has the rule.
cudaError_t unsafe(const char* api) {
  if (self().mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool forbidden = false;
  for (auto& [id, capture] : state().captures) {
    const bool mine = capture->thread == std::this_thread::get_id();
    if ((mine && capture->mode != cudaStreamCaptureModeRelaxed) ||
        (!mine && capture->mode == cudaStreamCaptureModeGlobal &&
         self().mode == cudaStreamCaptureModeGlobal)) {
      forbidden = true;
      invalidate(
          capture, std::string(api) + (mine ? " in the capturing thread" : " in another thread"));
    }
  }
  return forbidden ? fail(api, cudaErrorStreamCaptureUnsupported, "unsafe while capturing")
                   : cudaSuccess;
}

static Capture* of_blocking_streams(int device) {
  for (auto& [id, capture] : state().captures)
    for (Stream* each : capture->streams)
      if (each->device == device && each->blocking()) return capture;
  return nullptr;
}

// The legacy stream encompasses every blocking stream of its device.
cudaError_t legacy_use(const char* api, Stream* stream) {
  Capture* capture = stream->legacy ? of_blocking_streams(stream->device) : nullptr;
  if (!capture) return cudaSuccess;
  invalidate(
      capture, std::string(api) + " on the legacy stream while a blocking stream is captured");
  return fail(api, cudaErrorStreamCaptureImplicit);
}

cudaError_t device_wide(const char* api, int device) {
  bool any = false;
  for (auto& [id, capture] : state().captures)
    if (capture->origin->device == device) {
      invalidate(capture, std::string(api) + " of the device");
      any = true;
    }
  return any ? fail(api, cudaErrorStreamCaptureUnsupported, "the device has a capturing stream")
             : cudaSuccess;
}

static void leave(Capture* capture) {
  for (Stream* each : capture->streams) {
    each->capture = nullptr;
    each->nodes.clear();
  }
  state().captures.erase(capture->id);
}

static std::set<Node*> with_ancestors(const std::vector<Node*>& of) {
  std::set<Node*> seen;
  std::vector<Node*> stack(of);
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (seen.insert(node).second)
      stack.insert(stack.end(), node->before.begin(), node->before.end());
  }
  return seen;
}

}  // namespace hostcuda

using namespace hostcuda;

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(self().mode, *mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ENTER();
  Stream* s = find(stream);
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  if (s->legacy) FAIL(cudaErrorStreamCaptureUnsupported, "the legacy stream cannot be captured");
  if (s->capture) FAIL(cudaErrorIllegalState, "the stream is capturing already");
  auto* graph = new Graph{++state().ids, {}};
  auto* capture = new Capture{++state().ids, s, mode, std::this_thread::get_id(), graph};
  capture->streams = {s};
  s->capture = capture;
  s->nodes.clear();
  state().captures[capture->id] = capture;
  state().graphs[graph->id] = graph;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  ENTER();
  Stream* s = find(stream);
  *out = nullptr;
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  Capture* capture = s->capture;
  if (!capture) FAIL(cudaErrorIllegalState, "the stream is not capturing");
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    FAIL(cudaErrorStreamCaptureWrongThread);
  if (capture->origin != s) {
    invalidate(capture, "ended in another stream than it began");
    FAIL(cudaErrorStreamCaptureUnmatched);
  }
  const std::set<Node*> joined = with_ancestors(s->nodes);
  std::string unjoined;
  for (Stream* each : capture->streams)
    for (Node* node : each->nodes)
      if (!joined.count(node))
        unjoined = node->work.name + " on stream " + std::to_string(each->index);
  leave(capture);
  if (capture->broken) FAIL(cudaErrorStreamCaptureInvalidated, capture->why.c_str());
  if (!unjoined.empty()) {
    finding("unjoined: " + unjoined);
    FAIL(cudaErrorStreamCaptureUnjoined, unjoined.c_str());
  }
  *out = reinterpret_cast<cudaGraph_t>(capture->graph);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER();
  Stream* s = find(stream);
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  if (s->legacy && of_blocking_streams(s->device)) FAIL(cudaErrorStreamCaptureImplicit);
  *status = !s->capture    ? cudaStreamCaptureStatusNone
      : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                           : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** before, const cudaGraphEdgeData** edges,
    size_t* count) {
  ENTER();
  TRY(cudaStreamIsCapturing(stream, status));
  Stream* s = find(stream);
  if (*status != cudaStreamCaptureStatusActive) return cudaSuccess;
  if (id) *id = s->capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(s->capture->graph);
  if (before) *before = reinterpret_cast<const cudaGraphNode_t*>(s->nodes.data());
  if (edges) *edges = nullptr;
  if (count) *count = s->nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(
    cudaStream_t stream, cudaGraphNode_t* nodes, const cudaGraphEdgeData*, size_t count,
    unsigned flags) {
  ENTER();
  Stream* s = find(stream);
  if (!s || !s->capture) FAIL(cudaErrorIllegalState);
  if (flags & cudaStreamSetCaptureDependencies) s->nodes.clear();
  for (size_t i = 0; i < count; ++i) s->nodes.push_back(reinterpret_cast<Node*>(nodes[i]));
  return cudaSuccess;
}
