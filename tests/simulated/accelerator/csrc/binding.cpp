// The Python module `simulated_accelerator`.

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "graph.h"
#include "python_errors.h"

namespace py = pybind11;

namespace {

using namespace simulated;

using Released = py::call_guard<py::gil_scoped_release>;

const char* name_of(HazardKind kind) {
  switch (kind) {
    case HazardKind::ReadAfterWrite:
      return "read-after-write";
    case HazardKind::WriteAfterRead:
      return "write-after-read";
    case HazardKind::WriteAfterWrite:
      return "write-after-write";
    case HazardKind::FreeInFlight:
      return "free-while-in-flight";
    case HazardKind::UseAfterFree:
      return "use-after-free";
  }
  return "";
}

py::dict description(const Stamp& stamp) {
  py::dict made;
  made["op"] = text_of(stamp.site.op);
  made["place"] = text_of(stamp.site.place);
  made["stream"] = Simulator::get().describe(stamp.lane);
  return made;
}

py::list hazards() {
  py::list all;
  for (const Hazard& hazard : Simulator::get().hazards()) {
    py::dict made;
    made["kind"] = name_of(hazard.kind);
    made["earlier"] = description(hazard.earlier);
    made["later"] = description(hazard.later);
    made["device"] = hazard.device;
    made["address"] = hazard.begin;
    made["begin"] = hazard.begin - hazard.block;
    made["end"] = hazard.end - hazard.block;
    made["labels"] = hazard.labels;
    made["count"] = hazard.count;
    all.append(made);
  }
  return all;
}

py::list launches(int device) {
  py::list all;
  for (const Launched& launched : Simulator::get().launches(device)) {
    py::dict made = description(launched.stamp);
    made["lane"] = launched.stamp.lane;
    made["tick"] = launched.stamp.tick;
    made["knows"] = launched.clock.ticks();
    all.append(made);
  }
  return all;
}

py::dict memory(int device) {
  MemoryStats stats = Simulator::get().stats(device);
  py::dict made;
  made["live"] = stats.live;
  made["peak"] = stats.peak;
  made["reserved"] = stats.reserved;
  made["allocations"] = stats.allocations;
  return made;
}

void set_errors(const std::map<std::string, py::object>& given) {
  const std::map<std::string, Error> names = {
      {"OtherDeviceError", Error::OtherDevice},
      {"UnrecordedEventError", Error::UnrecordedEvent},
      {"MixedDevicesError", Error::MixedDevices},
      {"NestedCaptureError", Error::NestedCapture},
      {"HostSyncInCaptureError", Error::HostSyncInCapture},
      {"ForeignEventError", Error::ForeignEvent},
      {"UnjoinedStreamError", Error::UnjoinedStream},
      {"OutsideCaptureError", Error::OutsideCapture},
      {"DefaultStreamCaptureError", Error::DefaultStreamCapture},
      {"CaptureError", Error::Capture},
      {"CollectiveFailedError", Error::Collective},
  };
  for (const auto& [name, error] : names) set_error_class(error, given.at(name).ptr());
}

}  // namespace

PYBIND11_MODULE(simulated_accelerator, module) {
  module.attr("DEVICES") = kDevices;
  module.attr("POOLED_STREAMS") = kPooledStreams;
  module.def("set_errors", &set_errors);
  module.def("set_ignored_files", &set_ignored_files);
  module.def("adopt_namespace", &adopt_namespace);
  module.def("current_device", &current_device);
  module.def("set_host", [](int device, int host) { Simulator::get().set_host(device, host); });
  module.def("name_stream", [](int device, int64_t stream, const std::string& name) {
    Simulator::get().name_stream(device, stream, name);
  });
  module.def("label", [](uintptr_t begin, size_t nbytes, const std::string& text) {
    Simulator::get().label(begin, nbytes, text);
  });
  module.def("hazards", &hazards);
  module.def("forget_hazards", [] { Simulator::get().forget_hazards(); });
  module.def("restart_schedules", [](bool keep) { Simulator::get().restart_schedules(keep); });
  module.def(
      "schedule_digest", [](int device) { return Simulator::get().schedule_digest(device); });
  module.def("launches", &launches);
  module.def("memory", &memory);
  module.def("empty_cache", [](int device) { Simulator::get().empty_cache(device); });
  module.def("reset_peak", [](int device) { Simulator::get().reset_peak(device); });
  module.def("capturing", [](int device) { return Simulator::get().capturing(device); });
  module.def("group_of", &group_of);
  module.def("abort_groups", &abort_groups);
  module.def("forget_groups", &forget_groups);
  py::class_<CapturedGraph>(module, "CapturedGraph")
      .def(py::init<>())
      .def("begin", &CapturedGraph::begin)
      .def("end", &CapturedGraph::end, Released())
      .def("reset", &CapturedGraph::reset, Released())
      .def("replay", &CapturedGraph::replay, Released())
      .def_property_readonly("capturing", &CapturedGraph::capturing)
      .def("__len__", &CapturedGraph::size);
}
