#include "places.h"

#include <Python.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "position.h"

#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing  // public as of Python 3.13
#endif

namespace simulated {

namespace {

std::mutex names_mutex;
std::unordered_map<std::string, int32_t> numbers;
std::vector<std::string> texts;

// Guarded by the GIL.
std::vector<std::string> ignored_prefixes;
std::unordered_map<PyCodeObject*, bool> ignored_code;
std::map<std::pair<PyCodeObject*, int>, int32_t> places;

std::string utf8(PyObject* text) {
  const char* bytes = text == nullptr ? nullptr : PyUnicode_AsUTF8(text);
  if (bytes == nullptr) PyErr_Clear();
  return bytes == nullptr ? "?" : bytes;
}

std::string attribute(PyCodeObject* code, const char* name) {
  PyObject* value = PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), name);
  std::string text = utf8(value);
  Py_XDECREF(value);
  return text;
}

bool is_ignored(PyCodeObject* code) {
  auto known = ignored_code.find(code);
  if (known != ignored_code.end()) return known->second;
  std::string file = attribute(code, "co_filename");
  bool ignored = file.rfind("<", 0) == 0;  // made by exec, or frozen into the interpreter
  for (const auto& prefix : ignored_prefixes) ignored = ignored || file.rfind(prefix, 0) == 0;
  Py_INCREF(code);  // for good: another code object must not take its address
  return ignored_code[code] = ignored;
}

int32_t place_of(PyFrameObject* frame, PyCodeObject* code) {
  int line = PyFrame_GetLineNumber(frame);
  auto known = places.find({code, line});
  if (known != places.end()) return known->second;
  std::string text = attribute(code, "co_filename") + ":" + std::to_string(line) + ":" +
      attribute(code, "co_qualname");
  return places[{code, line}] = intern(text);
}

// Returns the place of the innermost frame that counts, or 0. Needs the GIL.
int32_t innermost_place() {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  int32_t place = 0;
  while (frame != nullptr && place == 0) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_ignored(code)) place = place_of(frame, code);
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return place;
}

}  // namespace

int32_t intern(const std::string& text) {
  std::lock_guard<std::mutex> lock(names_mutex);
  if (texts.empty()) texts.push_back("");  // 0 is no place
  auto found = numbers.emplace(text, static_cast<int32_t>(texts.size()));
  if (found.second) texts.push_back(text);
  return found.first->second;
}

std::string text_of(int32_t number) {
  std::lock_guard<std::mutex> lock(names_mutex);
  return static_cast<size_t>(number) < texts.size() ? texts[number] : "";
}

int32_t current_place() {
  int32_t place = 0;
  if (Py_IsInitialized() && !Py_IsFinalizing()) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(
        &type, &value, &traceback);  // an exception may be on its way while tensors are freed
    place = innermost_place();
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
  }
  if (place != 0) return place;
  std::string node = running_autograd_node();
  return intern(node.empty() ? "no Python frame" : "backward of " + node);
}

void set_ignored_files(std::vector<std::string> prefixes) {
  ignored_prefixes = std::move(prefixes);
  ignored_code.clear();
}

}  // namespace simulated
