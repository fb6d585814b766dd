// Graphs: their nodes and edges, and their launches.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "state.h"

namespace hostcuda {

namespace {
Node* as_node(cudaGraphNode_t node) { return reinterpret_cast<Node*>(node); }
Graph* as_graph(cudaGraph_t graph) { return reinterpret_cast<Graph*>(graph); }

// Each node becomes work of its own, ordered by the graph's edges alone.
void launch_nodes(Exec& exec, Stream* stream) {
  const Point before = before_next(stream);
  std::vector<ItemPtr> items;
  std::vector<bool> is_last(exec.work.size(), true);
  for (size_t i = 0; i < exec.work.size(); ++i) {
    std::vector<ItemPtr> needs;
    for (size_t other : exec.before[i]) {
      needs.push_back(items[other]);
      is_last[other] = false;
    }
    if (needs.empty()) needs = before;
    items.push_back(submit(stream, exec.work[i], std::move(needs)));
  }
  std::vector<ItemPtr> last = exec.work.empty() ? before : Point{};
  for (size_t i = 0; i < items.size(); ++i)
    if (is_last[i]) last.push_back(items[i]);
  stream->tail = {submit(stream, Work{"graph", std::to_string(exec.id)}, std::move(last))};
}
}  // namespace

}  // namespace hostcuda

using namespace hostcuda;

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  ENTER();
  Graph* g = as_graph(graph);
  if (nodes && !*count) FAIL(cudaErrorInvalidValue);
  if (nodes)
    for (size_t i = 0; i < *count && i < g->nodes.size(); ++i)
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(g->nodes[i].get());
  *count = g->nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(
    cudaGraphNode_t node, cudaGraphNode_t* before, cudaGraphEdgeData* edges, size_t* count) {
  ENTER();
  Node* n = as_node(node);
  if (before)
    for (size_t i = 0; i < *count && i < n->before.size(); ++i) {
      before[i] = reinterpret_cast<cudaGraphNode_t>(n->before[i]);
      if (edges) memset(&edges[i], 0, sizeof edges[i]);
    }
  *count = n->before.size();
  return cudaSuccess;
}
API cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  ENTER();
  TRY(unsafe(call_.api));
  Graph* g = as_graph(graph);
  auto exec = std::make_unique<Exec>();
  exec->id = ++state().ids;
  exec->graph = g->id;
  exec->kept = g->kept;
  std::map<Node*, size_t> position;
  for (auto& node : g->nodes) {
    position[node.get()] = exec->work.size();
    exec->work.push_back(node->work);
    std::vector<size_t> before;
    for (Node* other : node->before) before.push_back(position.at(other));
    exec->before.push_back(std::move(before));
  }
  *out = reinterpret_cast<cudaGraphExec_t>(exec.get());
  state().execs.push_back(std::move(exec));
  return cudaSuccess;
}
API cudaError_t
cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(out, graph, flags);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  ENTER();
  auto* exec = reinterpret_cast<Exec*>(handle);
  if (!exec || !exec->alive) FAIL(cudaErrorInvalidValue, "the graph is gone");
  Stream* s = find(stream);
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  for (auto& each : exec->work) {
    const std::vector<Range>* ranges = &each.ranges;
    auto known = state().operators.find(each.label);
    if (each.label && known != state().operators.end()) ranges = &known->second.second;
    for (auto& range : *ranges)
      if (is_device_address(range.ptr) && !is_allocated(range.ptr))
        finding(
            "graph " + std::to_string(exec->id) + ": " + each.kind + " " + each.name +
            " uses freed memory");
  }
  ++exec->launches;
  if (s->capture) {
    Work work{"graph", std::to_string(exec->id)};
    return give(call_.api, s, std::move(work));
  }
  TRY(legacy_use(call_.api, s));
  launch_nodes(*exec, s);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  std::vector<std::function<Body()>> over;  // destroyed without the lock
  std::vector<Kept> kept;
  ENTER();
  auto* exec = reinterpret_cast<Exec*>(handle);
  exec->alive = false;  // kept, to be looked at
  kept.swap(exec->kept);
  for (Work& work : exec->work) over.push_back(std::exchange(work.start, nullptr));
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  std::unique_ptr<Graph> over;  // destroyed without the lock
  ENTER();
  Graph* g = as_graph(graph);
  if (!g || !state().graphs.erase(g->id)) FAIL(cudaErrorInvalidValue);
  for (Event* e : state().events)
    e->nodes.erase(
        std::remove_if(e->nodes.begin(), e->nodes.end(), [g](Node* n) { return n->graph == g; }),
        e->nodes.end());
  over.reset(g);
  return cudaSuccess;
}
// An object belongs to its creator, until that releases it or gives it to a graph; and to each
// graph that keeps it.
API cudaError_t cudaUserObjectCreate(
    cudaUserObject_t* out, void* pointer, cudaHostFn_t destroy, unsigned, unsigned) {
  return *out = reinterpret_cast<cudaUserObject_t>(new Kept(pointer, destroy)), cudaSuccess;
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  return delete reinterpret_cast<Kept*>(object), cudaSuccess;
}
API cudaError_t
cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned flags) {
  ENTER();
  auto* kept = reinterpret_cast<Kept*>(object);
  as_graph(graph)->kept.push_back(*kept);
  if (flags & cudaGraphUserObjectMove) delete kept;
  return cudaSuccess;
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned) {
  ENTER();
  FILE* file = fopen(path, "w");
  if (!file) FAIL(cudaErrorInvalidValue);
  fprintf(file, "digraph dot {\n");
  for (auto& node : as_graph(graph)->nodes) {
    fprintf(
        file, "n%lu [label=%s];\n", node->id,
        quoted(node->work.kind + " " + node->work.name).c_str());
    for (Node* before : node->before) fprintf(file, "n%lu -> n%lu;\n", before->id, node->id);
  }
  fprintf(file, "}\n");
  fclose(file);
  return cudaSuccess;
}
