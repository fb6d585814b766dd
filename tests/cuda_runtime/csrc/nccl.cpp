// libnccl.so.2: what a group launches on a stream is one node, or one piece of eager work, for each
// communicator.
//
// Ranks are processes of one machine and exchange what they send through files in /dev/shm. Nothing
// blocks: work whose peers have not come is tried again later, so that other work goes on, as on a
// device. A thread looks after peers that wait for work which nothing here has asked for yet.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "interface.h"

using hostcuda::advance;
using hostcuda::Body;
using hostcuda::on_host;
using hostcuda::Range;

// NCCL's binary interface, as far as torch uses it.
enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInvalidUsage = 5
};
enum ncclDataType_t {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2
};
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclFirstOwn };
enum ncclScalarResidence_t { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };
struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t;
constexpr int VERSION = 22809;

struct ncclComm {
  int rank, size, device;
  std::string key;
  std::atomic<bool> aborted{false};
  uint64_t named = 0, splits = 0;
  std::atomic<uint64_t> launched{0}, finished{0},
      messages{0};  // collectives; sends and receives under way
  std::map<std::pair<int, int>, uint64_t> sent, received;  // messages, by sender and receiver
  std::vector<double> factors;  // of operators made by ncclRedOpCreatePreMulSum
};
using ncclComm_t = ncclComm*;

namespace {

const std::string SHARED = "/dev/shm/hostcuda-";

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

// -- files
// -------------------------------------------------------------------------------------------------

std::string collective_file(const ncclComm* comm, uint64_t number, int rank) {
  return SHARED + comm->key + "-" + std::to_string(number) + "-" + std::to_string(rank);
}

void post(const std::string& path, const void* data, size_t size) {
  const std::string unfinished = path + "~";
  FILE* out = fopen(unfinished.c_str(), "w");
  if (!out || fwrite(data, 1, size, out) != size) perror(path.c_str()), abort();
  fclose(out);
  rename(unfinished.c_str(), path.c_str());
}

bool is_there(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

bool fetch(const std::string& path, size_t size, std::string& into) {
  FILE* in = fopen(path.c_str(), "r");
  if (!in) return false;
  into.resize(size + 1);
  const size_t got = fread(into.data(), 1, size + 1, in);
  fclose(in);
  if (got != size)
    fprintf(stderr, "[hostcuda] NCCL: %s has %zu bytes, expected %zu\n", path.c_str(), got, size),
        abort();
  into.resize(size);
  return true;
}

void remove_stale() {
  DIR* folder = opendir("/dev/shm");
  if (!folder) return;
  while (dirent* entry = readdir(folder)) {
    const std::string path = std::string("/dev/shm/") + entry->d_name;
    struct stat status;
    if (!path.compare(0, SHARED.size(), SHARED) && !stat(path.c_str(), &status) &&
        status.st_mtime + 1800 < time(nullptr))
      unlink(path.c_str());
  }
  closedir(folder);
}

// -- peers that wait
// -------------------------------------------------------------------------------------------------

std::mutex mutex;
std::set<ncclComm*> communicators;

void look_after_peers() {
  while (true) {
    std::vector<ncclComm*> all;
    {
      std::lock_guard<std::mutex> lock(mutex);
      all.assign(communicators.begin(), communicators.end());
    }
    bool busy = false;
    for (ncclComm* comm : all) {
      const uint64_t next = comm->finished + 1;
      bool waited_for = comm->messages > 0;
      if (next <= comm->launched)
        for (int rank = 0; rank < comm->size && !waited_for; ++rank)
          waited_for = rank != comm->rank && is_there(collective_file(comm, next, rank));
      if (waited_for) advance(comm);
      busy = busy || waited_for || next <= comm->launched;
    }
    usleep(busy ? 200 : 2000);
  }
}

ncclComm* make(int size, int rank, const std::string& key) {
  int device;
  cudaGetDevice(&device);
  void* buffer = nullptr;  // as NCCL does; it is refused while a capture forbids it
  if (cudaMalloc(&buffer, 1 << 20)) return nullptr;
  auto* comm = new ncclComm{rank, size, device, key};
  if (size == 1) return comm;
  std::lock_guard<std::mutex> lock(mutex);
  static pid_t watched = 0;
  if (watched != getpid()) std::thread(look_after_peers).detach();
  watched = getpid();
  communicators.insert(comm);
  return comm;
}

// -- exchange
// -------------------------------------------------------------------------------------------------

using All = std::vector<std::string>;

// Gives `size` bytes to all ranks, and `then` what all have given.
Body exchange(ncclComm* comm, const void* send, size_t size, std::function<void(const All&)> then) {
  if (comm->size == 1)
    return [=] { return then({std::string((const char*)on_host(send), size)}), true; };
  const uint64_t number = ++comm->launched;
  auto all = std::make_shared<All>();
  return [=] {
    if (comm->aborted) return true;
    if (all->empty()) {
      all->reserve(comm->size);
      post(collective_file(comm, number, comm->rank), on_host(send), size);
    }
    while (int(all->size()) < comm->size) {
      std::string data;
      if (!fetch(collective_file(comm, number, int(all->size())), size, data)) return false;
      all->push_back(std::move(data));
    }
    unlink(collective_file(comm, number - 1, comm->rank)
               .c_str());  // all have finished it: they have begun this one
    then(*all);
    comm->finished = number;
    return true;
  };
}

std::string message_file(const ncclComm* comm, int from, int to, uint64_t number) {
  return SHARED + comm->key + "-" + std::to_string(from) + "to" + std::to_string(to) + "-" +
      std::to_string(number);
}

Body message(ncclComm* comm, void* memory, size_t size, int from, int to, bool sends) {
  const std::string path =
      message_file(comm, from, to, ++(sends ? comm->sent : comm->received)[{from, to}]);
  ++comm->messages;
  return [=] {
    if (!comm->aborted) {
      std::string data;
      if (sends) post(path, on_host(memory), size);
      else if (!fetch(path, size, data)) return false;
      else memcpy(on_host(memory), data.data(), size), unlink(path.c_str());
    }
    --comm->messages;
    return true;
  };
}

// -- sums
// -------------------------------------------------------------------------------------------------

float from_half(uint16_t h, bool bfloat) {
  if (bfloat) {
    uint32_t bits = uint32_t(h) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
  }
  _Float16 x;
  memcpy(&x, &h, 2);
  return float(x);
}

uint16_t to_half(float x, bool bfloat) {
  uint16_t out;
  if (bfloat) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    out = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  } else {
    _Float16 h = _Float16(x);
    memcpy(&out, &h, 2);
  }
  return out;
}

struct Operator {
  ncclRedOp_t op;
  double factor;  // of each summand
};

template <class T>
T combine(T a, T b, ncclRedOp_t op) {
  if (op == ncclMax) return a != a || b != b ? T(a + b) : std::max(a, b);
  if (op == ncclMin) return a != a || b != b ? T(a + b) : std::min(a, b);
  return op == ncclProd ? T(a * b) : T(a + b);
}

// In the order of ranks, so that a sum is the same bits on all of them and in every run.
template <class T, class Load, class Store>
void reduce_each(const All& all, size_t count, Operator by, Load load, Store store) {
  for (size_t i = 0; i < count; ++i) {
    auto term = [&](size_t rank) {
      return by.factor == 1 ? load(all[rank], i) : T(load(all[rank], i) * T(by.factor));
    };
    T sum = term(0);
    for (size_t rank = 1; rank < all.size(); ++rank) sum = combine(sum, term(rank), by.op);
    store(i, by.op == ncclAvg ? T(sum / T(all.size())) : sum);
  }
}

template <class T>
void reduce_as(const All& all, size_t from, size_t count, void* out, Operator by) {
  reduce_each<T>(
      all, count, by,
      [=](const std::string& data, size_t i) { return ((const T*)data.data())[from + i]; },
      [=](size_t i, T value) { ((T*)out)[i] = value; });
}

void reduce(
    const All& all, size_t from, size_t count, void* out, ncclDataType_t type, Operator by) {
  switch (type) {
    case ncclFloat32:
      return reduce_as<float>(all, from, count, out, by);
    case ncclFloat64:
      return reduce_as<double>(all, from, count, out, by);
    case ncclInt32:
      return reduce_as<int32_t>(all, from, count, out, by);
    case ncclUint32:
      return reduce_as<uint32_t>(all, from, count, out, by);
    case ncclInt64:
      return reduce_as<int64_t>(all, from, count, out, by);
    case ncclUint64:
      return reduce_as<uint64_t>(all, from, count, out, by);
    case ncclUint8:
      return reduce_as<uint8_t>(all, from, count, out, by);
    case ncclInt8:
      return reduce_as<int8_t>(all, from, count, out, by);
    case ncclFloat16:
    case ncclBfloat16: {
      const bool b = type == ncclBfloat16;
      return reduce_each<float>(
          all, count, by,
          [=](const std::string& data, size_t i) {
            return from_half(((const uint16_t*)data.data())[from + i], b);
          },
          [=](size_t i, float value) { ((uint16_t*)out)[i] = to_half(value, b); });
    }
    default:
      fprintf(stderr, "[hostcuda] NCCL: no sums of type %d\n", int(type)), abort();
  }
}

Operator operator_of(const ncclComm* comm, ncclRedOp_t op) {
  if (op < ncclFirstOwn) return {op, 1};
  return {ncclSum, comm->factors[op - ncclFirstOwn]};
}

// -- groups
// -------------------------------------------------------------------------------------------------

struct Op {
  ncclComm* comm;
  cudaStream_t stream;
  std::string name;
  std::vector<Range> ranges;
  std::function<Body()> start;
  bool is_message = false;
};
thread_local int depth = 0;
thread_local std::vector<Op> group;

std::function<Body()> together(std::vector<Op> ops) {
  return [ops = std::move(ops)]() -> Body {
    struct Part {
      Body body;
      bool is_message, done;
    };
    auto parts = std::make_shared<std::vector<Part>>();
    for (const Op& op : ops) parts->push_back({op.start(), op.is_message, false});
    return [parts] {
      bool all = true;
      for (Part& part : *parts) {  // messages pass each other, collectives do not
        if (part.done || (!all && !part.is_message)) continue;
        part.done = part.body();
        all = all && part.done;
      }
      for (Part& part : *parts) all = all && part.done;
      return all;
    };
  };
}

// With NCCL_LAUNCH_ORDER_IMPLICIT the launches of all communicators have one order in a graph, that
// of their capture. NCCL orders their starts; here one begins when the one before is over.
cudaError_t launch(hostcuda::Work work, cudaStream_t stream) {
  const char* implicit = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (implicit && atoi(implicit)) cudaStreamGetCaptureInfo(stream, &status, &capture);
  if (status != cudaStreamCaptureStatusActive) return hostcuda::give(std::move(work), stream);
  static std::map<unsigned long long, cudaEvent_t> launched;
  std::lock_guard<std::mutex> lock(mutex);
  auto [last, is_first] = launched.try_emplace(capture);
  cudaError_t error = is_first ? cudaEventCreateWithFlags(&last->second, cudaEventDisableTiming)
                               : cudaStreamWaitEvent(stream, last->second);
  if (!error) error = hostcuda::give(std::move(work), stream);
  return error ? error : cudaEventRecord(last->second, stream);
}

ncclResult_t flush() {
  std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<Op>> merged;
  std::vector<std::pair<ncclComm*, cudaStream_t>> order;
  for (Op& op : group) {
    auto key = std::make_pair(op.comm, op.stream);
    if (!merged.count(key)) order.push_back(key);
    merged[key].push_back(std::move(op));
  }
  group.clear();
  for (auto& key : order) {
    hostcuda::Work work{"nccl"};
    for (const Op& op : merged[key]) {
      work.name += (work.name.empty() ? "" : "+") + op.name;
      work.ranges.insert(work.ranges.end(), op.ranges.begin(), op.ranges.end());
    }
    work.start = together(std::move(merged[key]));
    work.in_line = key.first;
    if (launch(std::move(work), key.second)) return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}

ncclResult_t add(Op op) {
  group.push_back(std::move(op));
  return depth ? ncclSuccess : flush();
}

// The end of a key tells what was split from one communicator.
std::string named(const char* what, ncclComm* comm) {
  const std::string name =
      comm->key.substr(0, 6) + comm->key.substr(std::min<size_t>(16, comm->key.size()));
  return std::string("nccl") + what + " " + name + " #" + std::to_string(++comm->named);
}

}  // namespace

extern "C" {
ncclResult_t ncclGetVersion(int* version) { return *version = VERSION, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  remove_stale();
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%08x%08x", random(), random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  *comm = make(size, rank, id.internal);
  return *comm ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, nullptr);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  *made = nullptr;
  const std::string name =
      comm->key + "s" + std::to_string(comm->splits++) + "c" + std::to_string(color);
  const int mine[2] = {color, key};
  All all;
  advance(comm);
  Body body = exchange(comm, mine, sizeof mine, [&](const All& given) { all = given; });
  while (!body()) {
    advance(comm);
    usleep(50);
  }
  if (color < 0) return ncclSuccess;
  int size = 0, rank = 0;
  for (int r = 0; r < comm->size; ++r) {
    const int* other = (const int*)all[r].data();
    if (other[0] != color) continue;
    ++size;
    if (other[1] < key || (other[1] == key && r < comm->rank)) ++rank;
  }
  return (*made = make(size, rank, name)) ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return hostcuda::finish_all(5000), ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  hostcuda::finish_all(5000);
  std::lock_guard<std::mutex> lock(mutex);
  communicators.erase(comm);  // not deleted: a graph may hold it
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  hostcuda::finish_all(500);
  comm->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return *error = ncclSuccess, ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return *count = comm->size, ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return *rank = comm->rank, ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return *device = comm->device, ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  return *handle = (void*)1, ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess           ? "no error"
      : result == ncclUnhandledCudaError ? "unhandled cuda error"
                                         : "NCCL error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
    ncclComm_t comm) {
  if (residence == ncclScalarDevice) cudaDeviceSynchronize(), scalar = on_host(scalar);
  double factor = type == ncclFloat64 ? *(double*)scalar
      : type == ncclFloat32           ? *(float*)scalar
                                      : from_half(*(uint16_t*)scalar, type == ncclBfloat16);
  comm->factors.push_back(factor);
  return *op = ncclRedOp_t(ncclFirstOwn + comm->factors.size() - 1), ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclGroupStart() { return ++depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() { return --depth ? ncclSuccess : flush(); }

ncclResult_t ncclAllGather(
    const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  const size_t size = count * size_of(type);
  return add(
      {comm,
       stream,
       named("AllGather", comm),
       {{send, size, false}, {recv, size * comm->size, true}},
       [=] {
         return exchange(comm, send, size, [=](const All& all) {
           for (int r = 0; r < comm->size; ++r)
             memcpy((char*)on_host(recv) + r * size, all[r].data(), size);
         });
       }});
}
ncclResult_t ncclReduceScatter(
    const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
    ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * size_of(type);
  const Operator by = operator_of(comm, op);
  return add(
      {comm,
       stream,
       named("ReduceScatter", comm),
       {{send, size * comm->size, false}, {recv, size, true}},
       [=] {
         return exchange(comm, send, size * comm->size, [=](const All& all) {
           reduce(all, comm->rank * count, count, on_host(recv), type, by);
         });
       }});
}
ncclResult_t ncclAllReduce(
    const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
    ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * size_of(type);
  const Operator by = operator_of(comm, op);
  return add(
      {comm, stream, named("AllReduce", comm), {{send, size, false}, {recv, size, true}}, [=] {
         return exchange(comm, send, size, [=](const All& all) {
           reduce(all, 0, count, on_host(recv), type, by);
         });
       }});
}
ncclResult_t ncclReduce(
    const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
    ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * size_of(type);
  const Operator by = operator_of(comm, op);
  return add(
      {comm,
       stream,
       named("Reduce", comm),
       {{send, size, false}, {recv, size, comm->rank == root}},
       [=] {
         return exchange(comm, send, size, [=](const All& all) {
           if (comm->rank == root) reduce(all, 0, count, on_host(recv), type, by);
         });
       }});
}
ncclResult_t ncclBroadcast(
    const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  const size_t size = count * size_of(type);
  return add(
      {comm, stream, named("Broadcast", comm), {{send, size, false}, {recv, size, true}}, [=] {
         return exchange(comm, comm->rank == root ? send : recv, size, [=](const All& all) {
           memcpy(on_host(recv), all[root].data(), size);
         });
       }});
}
ncclResult_t ncclBcast(
    void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(
    const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t stream) {
  const size_t size = count * size_of(type);
  return add(
      {comm,
       stream,
       named("AlltoAll", comm),
       {{send, size * comm->size, false}, {recv, size * comm->size, true}},
       [=] {
         return exchange(comm, send, size * comm->size, [=](const All& all) {
           for (int r = 0; r < comm->size; ++r)
             memcpy((char*)on_host(recv) + r * size, all[r].data() + comm->rank * size, size);
         });
       }});
}
ncclResult_t ncclSend(
    const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  const size_t size = count * size_of(type);
  return add(
      {comm,
       stream,
       named("Send", comm),
       {{send, size, false}},
       [=] { return message(comm, const_cast<void*>(send), size, comm->rank, peer, true); },
       true});
}
ncclResult_t ncclRecv(
    void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  const size_t size = count * size_of(type);
  return add(
      {comm,
       stream,
       named("Recv", comm),
       {{recv, size, true}},
       [=] { return message(comm, recv, size, peer, comm->rank, false); },
       true});
}
}
