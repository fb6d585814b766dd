// Collectives between virtual ranks: threads of this process, each with a simulated device.
//
// A rank's part runs on its current stream, which the process group makes a communication stream.
// The ranks meet twice. After the first meeting each reads what it needs, also from its peers,
// ordered after everything that every peer's communication stream had been given; after the second
// each writes its outputs, so that nobody overwrites what a peer still reads.

#include <Python.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <memory>

#include "services.h"
#include "tensors.h"

namespace simulated {

namespace {

// What a rank brings to a meeting.
struct Offer {
  Clock clock;
  std::string what;
  bool captured = false;
  std::vector<at::Tensor> inputs;
};

using Offers = std::shared_ptr<const std::vector<Offer>>;

class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Where the ranks of one group wait for each other.
class Meeting {
 public:
  Meeting(int size, double timeout_s) : here_(size), offers_(size), timeout_s_(timeout_s) {}

  int size() const { return static_cast<int>(here_.size()); }

  Offers meet(int rank, Offer offer) {
    WithoutGil released;
    std::unique_lock<std::mutex> lock(mutex_);
    refuse_if_aborted();
    offers_[rank] = std::move(offer);
    here_[rank] = true;
    if (++count_ == size()) {
      complete_ = std::make_shared<const std::vector<Offer>>(std::move(offers_));
      offers_.assign(size(), {});
      here_.assign(size(), false);
      count_ = 0;
      ++turn_;
      everybody_.notify_all();
      return complete_;
    }
    auto turn = turn_;
    auto limit = std::chrono::duration<double>(timeout_s_);
    bool came =
        everybody_.wait_for(lock, limit, [&] { return turn_ != turn || !aborted_.empty(); });
    if (turn_ != turn) return complete_;
    refuse_if_aborted();
    if (!came) throw Refusal(Error::Collective, late(offers_[rank].what));
    return complete_;
  }

  void abort(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = reason;
    everybody_.notify_all();
  }

 private:
  void refuse_if_aborted() const {
    if (!aborted_.empty())
      throw Refusal(Error::Collective, "the collective was given up: " + aborted_);
  }

  std::string late(const std::string& what) const {
    std::string missing;
    for (int rank = 0; rank < size(); ++rank)
      if (!here_[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    return what + ": waited " + std::to_string(static_cast<int>(timeout_s_)) + " s for rank(s) " +
        missing + " of the group, which did not come";
  }

  std::mutex mutex_;
  std::condition_variable everybody_;
  std::vector<bool> here_;
  std::vector<Offer> offers_;
  Offers complete_;
  int count_ = 0;
  int64_t turn_ = 0;
  std::string aborted_;
  double timeout_s_;
};

std::mutex groups_mutex;
std::map<std::string, int> numbers;
std::vector<std::shared_ptr<Meeting>> meetings;

std::shared_ptr<Meeting> meeting_of(int group) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  return meetings.at(group);
}

// One rank's part of one collective; what a captured graph keeps of it.
struct Part {
  std::shared_ptr<Meeting> meeting;
  std::string kind;
  std::string reduction;
  int root;
  int rank;
  std::vector<at::Tensor> inputs;   // on the CPU, on the device's bytes
  std::vector<at::Tensor> outputs;  // the same
  std::vector<Access> writes;

  void run(Lane lane, Site site, Graph* graph) const;
  std::string what() const;
  void require_agreement(const std::vector<Offer>& offers) const;
  // Returns, for each output, the tensors that are added up into it: (rank, input of that rank).
  std::vector<std::vector<std::pair<int, int>>> sources() const;
  at::Tensor reduced(const std::vector<at::Tensor>& values) const;
};

std::string Part::what() const {
  std::string text = kind;
  if (!reduction.empty()) text += " (" + reduction + ")";
  return text;
}

std::vector<std::vector<std::pair<int, int>>> Part::sources() const {
  std::vector<std::vector<std::pair<int, int>>> found(outputs.size());
  for (int out = 0; out < static_cast<int>(outputs.size()); ++out) {
    if (kind == "all_gather") {
      found[out] = {{out, 0}};
    } else if (kind == "all_to_all") {
      found[out] = {{out, rank}};
    } else if (kind == "broadcast") {
      found[out] = {{root, out}};
    } else if (kind == "scatter") {
      found[out] = {{root, rank}};
    } else {
      for (int peer = 0; peer < meeting->size(); ++peer)
        found[out].emplace_back(peer, kind == "reduce_scatter" ? rank : out);
    }
  }
  return found;
}

// Adds up in the order of the ranks, each sum rounded to the tensors' dtype.
at::Tensor Part::reduced(const std::vector<at::Tensor>& values) const {
  at::Tensor total = values[0].clone();
  for (size_t i = 1; i < values.size(); ++i) {
    if (reduction == "max") total = total.maximum(values[i]);
    else if (reduction == "min") total = total.minimum(values[i]);
    else if (reduction == "product") total.mul_(values[i]);
    else total.add_(values[i]);
  }
  if (reduction == "avg") total.div_(static_cast<double>(values.size()));
  return total;
}

void Part::require_agreement(const std::vector<Offer>& offers) const {
  for (int peer = 0; peer < meeting->size(); ++peer) {
    const Offer& offer = offers[peer];
    if (offer.what != offers[0].what)
      throw Refusal(
          Error::Collective,
          "rank 0 of the group is in " + offers[0].what + ", rank " + std::to_string(peer) +
              " in " + offer.what);
    if (offer.captured != offers[0].captured)
      throw Refusal(Error::Collective, offer.what + ": some ranks capture it and some run it");
  }
}

void Part::run(Lane lane, Site site, Graph* graph) const {
  auto& simulator = Simulator::get();
  Offer mine{simulator.clock_of(lane), what(), graph != nullptr, inputs};
  Offers begun = meeting->meet(rank, std::move(mine));
  require_agreement(*begun);
  for (const Offer& offer : *begun) simulator.join(lane, offer.clock);

  std::vector<at::Tensor> values;
  std::vector<Access> reads;
  auto wanted = sources();
  for (size_t out = 0; out < outputs.size(); ++out) {
    std::vector<at::Tensor> terms;
    for (auto [peer, index] : wanted[out]) {
      const at::Tensor& term = begun->at(peer).inputs.at(index);
      if (term.numel() != outputs[out].numel() || term.scalar_type() != outputs[out].scalar_type())
        throw Refusal(
            Error::Collective,
            what() + ": rank " + std::to_string(peer) + " of the group sent " +
                std::to_string(term.numel()) + " elements of " + c10::toString(term.scalar_type()) +
                ", rank " + std::to_string(rank) + " has room for " +
                std::to_string(outputs[out].numel()) + " of " +
                c10::toString(outputs[out].scalar_type()));
      terms.push_back(term);
      if (term.numel() > 0)
        reads.push_back({reinterpret_cast<uintptr_t>(term.data_ptr()), term.nbytes(), false});
    }
    values.push_back(reduced(terms));
  }
  Stamp stamp = simulator.tick(lane, site);
  if (graph == nullptr) simulator.check(stamp, reads);

  Offers read = meeting->meet(rank, {simulator.clock_of(lane), what(), graph != nullptr, {}});
  for (const Offer& offer : *read) simulator.join(lane, offer.clock);
  if (graph == nullptr) simulator.check(stamp, writes);
  else simulator.remember_for_undo(*graph, writes);
  for (size_t out = 0; out < outputs.size(); ++out)
    outputs[out].view(-1).copy_(values[out].view(-1));
}

void collective(
    at::TensorList inputs, at::TensorList outputs, c10::string_view kind,
    c10::string_view reduction, int64_t root, int64_t group, int64_t rank) {
  Part part{
      meeting_of(static_cast<int>(group)),
      std::string(kind),
      std::string(reduction),
      static_cast<int>(root),
      static_cast<int>(rank),
      {},
      {},
      {}};
  int device = (inputs.empty() ? outputs : inputs)[0].device().index();
  for (const at::Tensor& tensor : inputs) part.inputs.push_back(on_cpu(tensor));
  for (const at::Tensor& tensor : outputs) {
    part.outputs.push_back(on_cpu(tensor));
    append_accesses(tensor, true, part.writes);
  }
  for (at::TensorList tensors : {inputs, outputs})
    for (const at::Tensor& tensor : tensors)
      if (!is_simulated(tensor) || tensor.device().index() != device || !tensor.is_contiguous())
        fail(
            Error::MixedDevices,
            part.what() + ": expected contiguous tensors on sim:" + std::to_string(device));
  OnDevice on(device);
  Site site = site_of("simulated::" + part.kind);
  told([&] {
    auto& simulator = Simulator::get();
    auto work = simulator.begin(device, current_stream(device), site, part.kind.c_str());
    part.run(work.stamp.lane, site, work.graph);
    if (work.graph == nullptr) return;
    auto again = [part](Lane lane, Site where) { part.run(lane, where, nullptr); };
    simulator.append(*work.graph, {Item::Call, work.stamp.lane, site, {}, {}, again, 0});
  });
}

}  // namespace

int group_of(const std::string& name, int size, double timeout_s) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  auto [found, is_new] = numbers.emplace(name, static_cast<int>(meetings.size()));
  if (is_new) meetings.push_back(std::make_shared<Meeting>(size, timeout_s));
  return found->second;
}

void abort_groups(const std::string& reason) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  for (const auto& [name, number] : numbers) meetings[number]->abort(reason);
}

void forget_groups() {
  std::lock_guard<std::mutex> lock(groups_mutex);
  numbers.clear();  // the meetings stay for graphs that hold them, and so do their numbers
}

}  // namespace simulated

TORCH_LIBRARY_FRAGMENT(simulated, library) {
  library.def(
      "collective(Tensor[] inputs, Tensor(a!)[] outputs, str kind, str reduction, int root, int "
      "group, int rank)"
      " -> ()");
}

TORCH_LIBRARY_IMPL(simulated, PrivateUse1, library) {
  library.impl("collective", simulated::collective);
}
