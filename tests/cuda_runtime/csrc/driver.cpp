// libcuda.so.1: the few functions of the driver that torch asks for by name.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "interface.h"

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x100 + device); }

// Memory that processes may share: a file of each handle, and its device.
static std::mutex mutex;
static std::map<CUmemGenericAllocationHandle, std::pair<int, int>> shared;

static CUmemGenericAllocationHandle handle_of(int fd, int device) {
  static CUmemGenericAllocationHandle last = 1 << 20;
  std::lock_guard<std::mutex> lock(mutex);
  return shared[++last] = {fd, device}, last;
}

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  return *uuid = *(CUuuid*)&properties.uuid, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  int device;
  cudaGetDevice(&device);
  return *context = context_of(device), CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = context_of(device), CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = cudaGetErrorString((cudaError_t)error), CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  return *text = cudaGetErrorName((cudaError_t)error), CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, (void*)pointer);
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    return *(int*)value = found.device, CUDA_SUCCESS;
  hostcuda::unsupported("cuPointerGetAttribute");
  return CUDA_ERROR_NOT_SUPPORTED;
}

// Virtual memory. A handle is the device that it is for: memory counts while it is mapped, at one
// place. Memory that can be shared is a file.
CUresult cuMemGetAllocationGranularity(
    size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *size = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(
    CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  int device;
  cudaGetDevice(&device);
  *address = (CUdeviceptr)hostcuda::reserve_addresses(size, device);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  int device;
  cudaGetDevice(&device);
  return hostcuda::free_addresses((void*)address, size, device), CUDA_SUCCESS;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* kind,
    unsigned long long) {
  *handle = 1 + kind->location.id;
  if (kind->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE) return CUDA_SUCCESS;
  if (kind->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return CUDA_ERROR_NOT_SUPPORTED;
  const int fd = memfd_create("hostcuda-shared", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  return *handle = handle_of(fd, kind->location.id), CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(
    void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = shared.find(handle);
  if (found == shared.end()) return CUDA_ERROR_INVALID_VALUE;
  return *(int*)out = dup(found->second.first), CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle* handle, void* fd, CUmemAllocationHandleType) {
  int device;
  cudaGetDevice(&device);
  return *handle = handle_of(dup(int(uintptr_t(fd))), device), CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = shared.find(handle);
  if (found != shared.end()) close(found->second.first), shared.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(
    CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = shared.find(handle);
  const auto [fd, device] =
      found == shared.end() ? std::make_pair(-1, int(handle) - 1) : found->second;
  return (CUresult)hostcuda::map_memory((void*)at, size, device, fd);
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  return (CUresult)hostcuda::unmap_memory((void*)address, size);
}
}
