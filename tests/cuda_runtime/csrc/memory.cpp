// Memory, copies and fills.
//
// The memory of a device is a sparse file mapped twice: at the address that programs see nothing
// can be read or written by the host, as on a real machine, and at a fixed distance the runtime
// itself reads and writes it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace hostcuda {

namespace {
constexpr size_t VIEW = size_t(1) << 40;  // the runtime's view = device address + VIEW
constexpr uintptr_t BASE = 0x200000000000;

void map(int index) {  // at the first allocation, so that a forked process may still choose
  Device& d = state().devices[index];
  if (d.fd >= 0) return;
  d.base = BASE + index * (VIEW / 16);
  d.fd = memfd_create("hostcuda", MFD_CLOEXEC);
  if (d.fd < 0 || ftruncate(d.fd, d.span)) abort();
  const int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* seen = mmap((void*)d.base, d.span, PROT_NONE, flags, d.fd, 0);
  void* ours = mmap((void*)(d.base + VIEW), d.span, PROT_READ | PROT_WRITE, flags, d.fd, 0);
  if (seen == MAP_FAILED || ours == MAP_FAILED) abort();
  d.free_ranges[d.base] = d.span;
}

// The allocation that an address lies in.
std::map<uintptr_t, std::pair<size_t, int>>::iterator allocation_of(const void* pointer) {
  auto& all = state().allocations;
  auto it = all.upper_bound(uintptr_t(pointer));
  if (it == all.begin()) return all.end();
  --it;
  return uintptr_t(pointer) < it->first + it->second.first ? it : all.end();
}

// Takes a range of free addresses; 0 if there is none.
uintptr_t take_range(Device& d, size_t size, size_t grain) {
  for (auto it = d.free_ranges.begin(); it != d.free_ranges.end(); ++it) {
    const uintptr_t start = (it->first + grain - 1) / grain * grain;
    if (start + size > it->first + it->second) continue;
    const uintptr_t from = it->first, end = from + it->second;
    d.free_ranges.erase(it);
    if (start > from) d.free_ranges[from] = start - from;
    if (end > start + size) d.free_ranges[start + size] = end - start - size;
    return start;
  }
  return 0;
}

void give_range(Device& d, uintptr_t start, size_t size) {
  auto after = d.free_ranges.lower_bound(start);
  if (after != d.free_ranges.end() && after->first == start + size) {
    size += after->second;
    after = d.free_ranges.erase(after);
  }
  if (after != d.free_ranges.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == start) {
      before->second += size;
      return;
    }
  }
  d.free_ranges[start] = size;
}

cudaError_t release(const char* api, void* pointer) {
  State& s = state();
  auto it = s.allocations.find(uintptr_t(pointer));
  if (it == s.allocations.end()) return fail(api, cudaErrorInvalidValue, "not an allocation");
  auto [size, device] = it->second;
  unmap_memory(pointer, size);
  return give_range(s.devices[device], uintptr_t(pointer), size), cudaSuccess;
}

// The stream that torch's allocator names, whichever device the thread is on.
Stream* stream_of(const void* pointer, cudaStream_t stream) {
  auto found = allocation_of(pointer);
  const bool is_legacy = stream == nullptr && found != state().allocations.end();
  return is_legacy ? state().devices[found->second.second].legacy : find(stream);
}

cudaError_t fill(const char* api, void* dst, int value, size_t size, Stream* stream) {
  if (size == 0) return cudaSuccess;
  if (is_device_address(dst) && !is_allocated(dst))
    return fail(api, cudaErrorInvalidValue, "not allocated");
  Work work{"memset", std::to_string(value), "", {{dst, size, true}}};
  work.start = doing([=] { memset(on_host(dst), value, size); });
  return give(api, stream, std::move(work));
}
}  // namespace

bool is_device_address(const void* p) { return uintptr_t(p) >= BASE && uintptr_t(p) < BASE + VIEW; }
bool is_allocated(const void* p) { return allocation_of(p) != state().allocations.end(); }
void* on_host(const void* p) {
  return is_device_address(p) ? (void*)(uintptr_t(p) + VIEW) : const_cast<void*>(p);
}

bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  auto it = state().pinned.upper_bound(uintptr_t(p));
  return it != state().pinned.begin() &&
      uintptr_t(p) < std::prev(it)->first + std::prev(it)->second;
}

cudaError_t allocate(const char* api, void** out, size_t size, int device) {
  State& s = state();
  map(device);
  Device& d = s.devices[device];
  if (size == 0) return *out = nullptr, cudaSuccess;
  const size_t grain = size >= (2 << 20) ? (2 << 20) : (64 << 10);
  const size_t rounded = (size + grain - 1) / grain * grain;
  if (d.used + rounded > d.total) return fail(api, cudaErrorMemoryAllocation);
  const uintptr_t start = take_range(d, rounded, grain);
  if (start == 0) return fail(api, cudaErrorMemoryAllocation);
  s.allocations[start] = {rounded, device};
  d.used += rounded;
  return *out = (void*)start, cudaSuccess;
}

// Addresses and the memory behind them apart, as the driver's calls for virtual memory have them.

void* reserve_addresses(size_t size, int device) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  map(device);
  return (void*)take_range(state().devices[device], size, 2 << 20);
}

void free_addresses(void* pointer, size_t size, int device) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  give_range(state().devices[device], uintptr_t(pointer), size);
}

// What the runtime sees at a device's addresses is the memory in a file from now on.
static void show(const void* pointer, size_t size, int fd, size_t offset) {
  const int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  if (mmap(on_host(pointer), size, PROT_READ | PROT_WRITE, flags, fd, offset) == MAP_FAILED)
    abort();
}

cudaError_t map_memory(void* pointer, size_t size, int device, int fd) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  Device& d = state().devices[device];
  if (d.used + size > d.total) return fail("cuMemMap", cudaErrorMemoryAllocation);
  if (is_allocated(pointer)) return fail("cuMemMap", cudaErrorInvalidValue, "mapped already");
  if (fd >= 0) show(pointer, size, fd, 0);
  state().allocations[uintptr_t(pointer)] = {size, device};
  return d.used += size, cudaSuccess;
}

cudaError_t unmap_memory(void* pointer, size_t size) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  auto it = state().allocations.find(uintptr_t(pointer));
  if (it == state().allocations.end() || it->second.first != size)
    return fail("cuMemUnmap", cudaErrorInvalidValue, "not mapped");
  Device& d = state().devices[it->second.second];
  show(pointer, size, d.fd, uintptr_t(pointer) - d.base);
  fallocate(d.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, uintptr_t(pointer) - d.base, size);
  state().allocations.erase(it);
  return d.used -= size, cudaSuccess;
}

// Called with the allocator's lock held: nothing may run here.
static void overwrite(Stream* s) {
  if (s->capture || s->freed.empty()) return;
  Work work{"lend", "torch's allocator", "", std::move(s->freed)};
  s->freed.clear();
  work.start = doing([ranges = work.ranges] {
    for (const Range& each : ranges) memset(on_host(each.ptr), 0xff, each.size);  // NaN
  });
  Thread& me = self();
  const bool launches = me.launches;
  ItemPtr item = submit(s, std::move(work), before_next(s));
  s->tail = {item};
  me.launches = launches;
  if (!me.last_item || me.last_stream != s) return;
  item->open = true;  // an operator has launched already: its values come after this
  me.open.push_back(item);
  me.last_item = item;
}

void freed(const void* pointer, size_t size, cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  Stream* s = stream_of(pointer, stream);
  if (!s) return;
  s->freed.push_back({pointer, size, true});
}

void allocated(const void* pointer, size_t size, cudaStream_t stream) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  Stream* s = stream_of(pointer, stream);
  if (!s) return;
  s->freed.push_back({pointer, size, true});
  overwrite(s);
}

void returned(const void* pointer, size_t size) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  const uintptr_t start = uintptr_t(pointer);
  for (Stream* each : state().streams) {
    auto gone = [&](const Range& r) {
      return uintptr_t(r.ptr) >= start && uintptr_t(r.ptr) < start + size;
    };
    each->freed.erase(
        std::remove_if(each->freed.begin(), each->freed.end(), gone), each->freed.end());
  }
}

cudaError_t copy(const char* api, void* dst, const void* src, size_t size, Stream* stream) {
  if (size == 0) return cudaSuccess;
  for (const void* p : {(const void*)dst, src})
    if (is_device_address(p) && !is_allocated(p))
      return fail(api, cudaErrorInvalidValue, "not allocated");
  const bool to_device = is_device_address(dst), from_device = is_device_address(src);
  const bool pageable = (!to_device && !is_pinned(dst)) || (!from_device && !is_pinned(src));
  if (stream && stream->capture && pageable)
    finding("a copy from or to pageable memory was captured: a replay uses the address again");
  Work work{
      "memcpy",
      to_device ? (from_device ? "DtoD" : "HtoD") : "DtoH",
      "",
      {{src, size, false}, {dst, size, true}}};
  if (stream && !stream->capture && !from_device &&
      pageable) {  // such a source may be changed when the call is over
    auto staged = std::make_shared<std::string>((const char*)src, size);
    work.start = doing([=] { memcpy(on_host(dst), staged->data(), size); });
  } else {
    work.start = doing([=] { memmove(on_host(dst), on_host(src), size); });
  }
  return give(api, stream, std::move(work));
}

}  // namespace hostcuda

using namespace hostcuda;

API cudaError_t cudaMalloc(void** out, size_t size) {
  ENTER();
  TRY(unsafe(call_.api));
  return allocate(call_.api, out, size, self().device);
}
API cudaError_t cudaFree(void* pointer) {
  Point all;
  {
    ENTER();
    TRY(unsafe(call_.api));  // also of a null pointer: it initializes
    if (!pointer) return cudaSuccess;
    for (Stream* each : state().by_index) add(all, each->tail);
  }
  wait_for(all);
  ENTER();
  return release(call_.api, pointer);
}
API cudaError_t cudaMallocAsync(void** out, size_t size, cudaStream_t stream) {
  ENTER();
  TRY(allocate(call_.api, out, size, self().device));
  return give(call_.api, find(stream), Work{"alloc", std::to_string(size)});
}
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  ENTER();
  Stream* s = find(stream);
  if (!s) FAIL(cudaErrorInvalidResourceHandle);
  Work work{"free", ""};
  if (!s->capture) work.start = doing([=] { release("cudaFreeAsync", pointer); });
  return give(call_.api, s, std::move(work));
}
API cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
  ENTER();
  TRY(unsafe(call_.api));
  *out = nullptr;
  if (size == 0) return cudaSuccess;
  *out = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*out == MAP_FAILED) FAIL(cudaErrorMemoryAllocation);
  state().pinned[uintptr_t(*out)] = size;
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* pointer) {
  Point all;
  {
    ENTER();
    TRY(unsafe(call_.api));
    if (!pointer) return cudaSuccess;
    for (Stream* each : state().by_index) add(all, each->tail);
  }
  wait_for(all);
  ENTER();
  auto found = state().pinned.find(uintptr_t(pointer));
  if (found == state().pinned.end()) FAIL(cudaErrorInvalidValue);
  munmap(pointer, found->second);
  state().pinned.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  ENTER();
  TRY(unsafe(call_.api));
  state().pinned[uintptr_t(pointer)] = size;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  ENTER();
  TRY(unsafe(call_.api));
  return state().pinned.erase(uintptr_t(pointer)) ? cudaSuccess
                                                  : fail(call_.api, cudaErrorInvalidValue);
}
API cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned) {
  return *out = host, cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  ENTER();
  *a = {};
  a->device = -2;
  a->type = cudaMemoryTypeUnregistered;
  auto found = allocation_of(pointer);
  if (found != state().allocations.end()) {
    a->type = cudaMemoryTypeDevice;
    a->device = found->second.second;
    a->devicePointer = const_cast<void*>(pointer);
  } else if (is_pinned(pointer)) {
    a->type = cudaMemoryTypeHost;
    a->device = 0;
    a->devicePointer = a->hostPointer = const_cast<void*>(pointer);
  } else if (!is_device_address(pointer)) {
    a->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}
API cudaError_t
cudaMemcpyAsync(void* dst, const void* src, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  Point point;
  {
    ENTER();
    Stream* s = find(stream);
    if (!s) FAIL(cudaErrorInvalidResourceHandle);
    TRY(copy(call_.api, dst, src, size, s));
    if (!s->capture && !is_device_address(dst) && !is_pinned(dst)) point = s->tail;
  }
  return wait_for(point), cudaSuccess;  // into pageable memory: it returns when it is done
}
API cudaError_t
cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t size, cudaStream_t stream) {
  ENTER();
  return copy(call_.api, dst, src, size, find(stream));
}
API cudaError_t cudaMemcpy(void* dst, const void* src, size_t size, cudaMemcpyKind) {
  Point point;
  {
    ENTER();
    Stream* s = find(nullptr);
    TRY(legacy_use(call_.api, s));
    TRY(unsafe(call_.api));
    TRY(copy(call_.api, dst, src, size, s));
    point = s->tail;
  }
  return wait_for(point), cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(
    void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t stream) {
  ENTER();
  Work work{"memcpy", "2D", "", {{src, spitch * height, false}, {dst, dpitch * height, true}}};
  work.start = doing([=] {
    for (size_t row = 0; row < height; ++row)
      memmove((char*)on_host(dst) + row * dpitch, (char*)on_host(src) + row * spitch, width);
  });
  return give(call_.api, find(stream), std::move(work));
}
API cudaError_t cudaMemset(void* dst, int value, size_t size) {
  ENTER();
  TRY(legacy_use(call_.api, find(nullptr)));
  TRY(unsafe(call_.api));
  return fill(call_.api, dst, value, size, find(nullptr));
}
API cudaError_t cudaMemsetAsync(void* dst, int value, size_t size, cudaStream_t stream) {
  ENTER();
  return fill(call_.api, dst, value, size, find(stream));
}
API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  ENTER();
  Device& d = state().devices[self().device];
  return *total = d.total, *available = d.total - d.used, cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(0x1000 + device)), cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  return *(uint64_t*)value = 0, cudaSuccess;
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
