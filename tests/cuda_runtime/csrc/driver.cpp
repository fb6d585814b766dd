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
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return *(int*)value = found.device, CUDA_SUCCESS;
  hostcuda::unsupported("cuPointerGetAttribute");
  return CUDA_ERROR_NOT_SUPPORTED;
}
}
