// Devices: that they exist, and what they say of themselves (an H200's numbers).
#include <cstdio>
#include <cstring>

#include "state.h"

using namespace hostcuda;

static bool exists(int device) { return device >= 0 && device < int(state().devices.size()); }

API cudaError_t cudaGetDeviceCount(int* count) {
  ENTER();
  *count = int(state().devices.size());
  if (*count == 0) FAIL(cudaErrorNoDevice);
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) { return *device = self().device, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  ENTER();
  if (!exists(device)) FAIL(cudaErrorInvalidDevice);
  return self().device = device, cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  ENTER();
  if (!exists(device)) FAIL(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200 (on the host)");
  memcpy(p->uuid.bytes, "hostcudadevice0", 15);
  p->uuid.bytes[15] = char(device);
  p->totalGlobalMem = state().devices[device].total;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448,
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32, p->multiProcessorCount = 132, p->major = 9, p->minor = 0;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536, p->memPitch = 0x7fffffff, p->textureAlignment = 512,
  p->surfaceAlignment = 512;
  p->texturePitchAlignment = 32, p->l2CacheSize = 60 << 20, p->memoryBusWidth = 6144,
  p->asyncEngineCount = 3;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported =
      p->managedMemory = 1;
  p->cooperativeLaunch = p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = 1;
  p->hostRegisterSupported = p->memoryPoolsSupported = p->clusterLaunch =
      p->concurrentManagedAccess = 1;
  p->pciBusID = 16 + device, p->unifiedFunctionPointers = 1, p->hostNumaId = -1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  TRY(cudaGetDeviceProperties(&p, device));
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = p.sharedMemPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = p.sharedMemPerBlockOptin;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = p.sharedMemPerMultiprocessor;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrTotalConstantMemory:
      *value = 65536;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 3201000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 6144;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 32;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrPciBusId:
      *value = p.pciBusID;
      break;
    case cudaDevAttrTextureAlignment:
    case cudaDevAttrSurfaceAlignment:
      *value = 512;
      break;
    case cudaDevAttrMaxPitch:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = 3;
      break;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrEccEnabled:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return snprintf(text, size, "0000:%02x:00.0", 16 + device), cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = device != peer, cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  ENTER();
  return unsafe(call_.api);
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// -- between processes: refused
// -----------------------------------------------------------------------------

#define REFUSED(name, arguments)               \
  API cudaError_t name arguments {             \
    unsupported(#name);                        \
    return fail(#name, cudaErrorNotSupported); \
  }
REFUSED(cudaIpcCloseMemHandle, (void*))
REFUSED(cudaIpcGetEventHandle, (cudaIpcEventHandle_t*, cudaEvent_t))
REFUSED(cudaIpcGetMemHandle, (cudaIpcMemHandle_t*, void*))
REFUSED(cudaIpcOpenEventHandle, (cudaEvent_t*, cudaIpcEventHandle_t))
REFUSED(cudaIpcOpenMemHandle, (void**, cudaIpcMemHandle_t, unsigned))
