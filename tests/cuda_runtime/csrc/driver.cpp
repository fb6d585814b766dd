// libcuda.so.1: the few functions of the driver that torch asks for by name.
#include <cuda.h>

#include "interface.h"

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x100 + device); }

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
// place.
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
    CUmemGenericAllocationHandle* handle, size_t, const CUmemAllocationProp* kind,
    unsigned long long) {
  return *handle = 1 + kind->location.id, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }
CUresult cuMemMap(
    CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  return (CUresult)hostcuda::map_memory((void*)at, size, int(handle) - 1);
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  return (CUresult)hostcuda::unmap_memory((void*)address, size);
}
}
