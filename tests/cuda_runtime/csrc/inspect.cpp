// What inspect.py asks: graphs, work with its order, findings, counts of calls.
#include "state.h"

namespace hostcuda {

namespace {
const char* kept(std::string text) {
  static thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

std::string described(const Work& work) {
  std::string out = "\"kind\":" + quoted(work.kind) + ",\"name\":" + quoted(work.name) +
      ",\"config\":" + quoted(work.config) + ",\"stream\":" + std::to_string(work.stream) +
      ",\"label\":" + std::to_string(work.label);
  const std::vector<Range>* ranges = &work.ranges;
  auto found = work.label ? state().operators.find(work.label) : state().operators.end();
  if (found != state().operators.end()) {
    ranges = &found->second.second;
    out += ",\"operator\":" + quoted(found->second.first);
  }
  out += ",\"ranges\":[";
  for (size_t i = 0; i < ranges->size(); ++i)
    out += (i ? ",[" : "[") + std::to_string(uintptr_t((*ranges)[i].ptr)) + "," +
        std::to_string((*ranges)[i].size) + "," + ((*ranges)[i].write ? "1]" : "0]");
  return out + "]";
}

template <class T>
std::string listed(const std::vector<T>& numbers) {
  std::string out = "[";
  for (size_t i = 0; i < numbers.size(); ++i) out += (i ? "," : "") + std::to_string(numbers[i]);
  return out + "]";
}

using Guard = std::lock_guard<std::recursive_mutex>;
}  // namespace

}  // namespace hostcuda

using namespace hostcuda;

API void hostcuda_trace(int on) {
  Guard guard(state().mutex);
  state().tracing = on;
  state().log.clear();
}
API void hostcuda_order(const char* how) {
  finish_all(60000);
  Guard guard(state().mutex);
  const std::string order = how;
  state().order = order == "host" ? Order::host : order == "late" ? Order::late : Order::random;
  if (state().order == Order::random) state().random.seed(std::stoull(order));
  state().questions = state().order == Order::host ? 1 : 3;
}
API void hostcuda_questions(int count) { state().questions = count; }
API int hostcuda_captures() { return int(state().captures.size()); }
API int hostcuda_execs() { return int(state().execs.size()); }
API int hostcuda_pending() { return int(state().pending.size()); }
API const char* hostcuda_findings(int forget) {
  Guard guard(state().mutex);
  std::string out = "[";
  for (auto& each : state().findings) out += (out.size() > 1 ? "," : "") + quoted(each);
  if (forget) state().findings.clear();
  return kept(out + "]");
}
API const char* hostcuda_calls() {
  Guard guard(state().mutex);
  std::string out = "{";
  for (auto& [name, count] : state().calls)
    out += (out.size() > 1 ? "," : "") + quoted(name) + ":" + std::to_string(count);
  return kept(out + "}");
}
API const char* hostcuda_exec(int index) {
  Guard guard(state().mutex);
  if (index < 0) index += int(state().execs.size());
  if (index < 0 || index >= int(state().execs.size())) return kept("null");
  Exec& exec = *state().execs[index];
  std::string out = "{\"id\":" + std::to_string(exec.id) +
      ",\"launches\":" + std::to_string(exec.launches) +
      ",\"alive\":" + (exec.alive ? "true" : "false") + ",\"nodes\":[";
  for (size_t i = 0; i < exec.work.size(); ++i)
    out +=
        (i ? ",{" : "{") + described(exec.work[i]) + ",\"before\":" + listed(exec.before[i]) + "}";
  return kept(out + "]}");
}
API const char* hostcuda_log() {
  Guard guard(state().mutex);
  std::string out = "[";
  for (auto& each : state().log)
    out += (out.size() > 1 ? ",{" : "{") + described(each.work) +
        ",\"id\":" + std::to_string(each.id) + ",\"before\":" + listed(each.before) + "}";
  return kept(out + "]");
}
API void* hostcuda_on_host(void* pointer) { return on_host(pointer); }
