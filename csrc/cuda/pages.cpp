// Memory of a device that goes and comes back while its addresses stay: the driver's calls for
// virtual memory.
//
// torch's allocator calls the first two functions for a pool of graphs, on any thread and under its
// own lock. A thread that waits for that lock may have Python's, so they cannot be written in
// Python. The driver is asked for at run time, and the types are those of cuda.h: neither has to be
// there for a build.
#include <dlfcn.h>
#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <set>

#define PUBLIC extern "C" __attribute__((visibility("default")))

namespace {

enum { kUnknown = 999, kDevice = 1, kPinned = 1, kReadWrite = 3 };

struct Location {
  int type, id;
};

struct AllocationProperties {
  int type, handle_types;
  Location location;
  void* metadata;
  unsigned char flags[8];
};

struct AccessDescription {
  Location location;
  int flags;
};

template <typename... Arguments>
int driver(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  auto* function =
      library ? reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name)) : nullptr;
  return function ? function(arguments...) : kUnknown;
}

AllocationProperties memory_of(int device) { return {kPinned, 0, {kDevice, device}, nullptr, {}}; }

size_t whole_pages(size_t nbytes, int device) {
  const AllocationProperties properties = memory_of(device);
  size_t page = 0;
  if (driver("cuMemGetAllocationGranularity", &page, &properties, 0) || !page) return 0;
  return (nbytes + page - 1) / page * page;
}

std::mutex mutex;
std::set<uint64_t> away;  // addresses without memory

}  // namespace

// Each returns a CUresult; 0 is success.

PUBLIC int shardgrad_pages_map(uint64_t address, size_t nbytes, int device) {
  const AllocationProperties properties = memory_of(device);
  const AccessDescription access = {properties.location, kReadWrite};
  const size_t size = whole_pages(nbytes, device);
  uint64_t handle = 0;
  if (int status = driver("cuMemCreate", &handle, size, &properties, uint64_t{0})) return status;
  int status = driver("cuMemMap", address, size, size_t{0}, handle, uint64_t{0});
  driver("cuMemRelease", handle);  // the memory goes when it is unmapped
  if (!status) status = driver("cuMemSetAccess", address, size, &access, size_t{1});
  if (status) return driver("cuMemUnmap", address, size), status;
  std::lock_guard<std::mutex> lock(mutex);
  away.erase(address);
  return status;
}

PUBLIC int shardgrad_pages_unmap(uint64_t address, size_t nbytes, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!away.insert(address).second) return 0;
  return driver("cuMemUnmap", address, whole_pages(nbytes, device));
}

// For torch's allocator: null if there is no memory. Work on memory has to be over before it is
// freed; it may be away.

PUBLIC void* shardgrad_pages_alloc(ssize_t nbytes, int device, void*) {
  const size_t size = whole_pages(nbytes, device);
  uint64_t address = 0;
  if (!size || driver("cuMemAddressReserve", &address, size, size_t{0}, uint64_t{0}, uint64_t{0}))
    return nullptr;
  if (!shardgrad_pages_map(address, nbytes, device)) return reinterpret_cast<void*>(address);
  driver("cuMemAddressFree", address, size);
  return nullptr;
}

PUBLIC void shardgrad_pages_free(void* memory, ssize_t nbytes, int device, void*) {
  const uint64_t address = reinterpret_cast<uint64_t>(memory);
  shardgrad_pages_unmap(address, nbytes, device);
  driver("cuMemAddressFree", address, whole_pages(nbytes, device));
  std::lock_guard<std::mutex> lock(mutex);
  away.erase(address);
}
