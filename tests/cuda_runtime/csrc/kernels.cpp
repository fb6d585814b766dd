// Kernels: registered by the constructors of libraries that nvcc compiled, and launched by their host functions.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace hostcuda {

namespace {
constexpr size_t MOST_SHARED = 232448, MOST_THREADS = 1024;

cudaError_t launch(const char* api, const void* function, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  Stream* s = find(stream);
  if (!s) return fail(api, cudaErrorInvalidResourceHandle, "unknown stream");
  if (s->device != self().device) return fail(api, cudaErrorInvalidResourceHandle, "a stream of another device");
  auto found = state().kernels.find(function);
  if (found == state().kernels.end()) return fail(api, cudaErrorInvalidDeviceFunction);
  const size_t threads = size_t(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > MOST_THREADS || grid.y > 65535 || grid.z > 65535 ||
      shared > MOST_SHARED)
    return fail(api, cudaErrorInvalidConfiguration, found->second);
  char config[120];
  snprintf(config, sizeof config, "%ux%ux%u/%ux%ux%u/%zu", grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
  return give(api, s, Work{"kernel", found->second, config});
}

std::pair<void*, size_t>* variable(const void* symbol) {
  auto found = state().variables.find(symbol);
  if (found == state().variables.end()) return nullptr;
  if (!found->second.first) allocate("variable", &found->second.first, found->second.second, self().device);
  return &found->second;
}
}  // namespace

}  // namespace hostcuda

using namespace hostcuda;

API void** __cudaRegisterFatBinary(void* binary) { return new void*[2]{binary, nullptr}; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  state().kernels[host] = name;
}
API void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  state().variables[host] = {nullptr, size};
}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  ENTER();
  auto* found = variable(symbol);
  if (!found) FAIL(cudaErrorInvalidValue);
  return *out = found->first, cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* src, size_t size, size_t offset, cudaMemcpyKind) {
  ENTER();
  TRY(unsafe(call_.api));
  auto* found = variable(symbol);
  if (!found) FAIL(cudaErrorInvalidValue);
  return copy(call_.api, (char*)found->first + offset, src, size, find(nullptr));
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  self().pushed.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (self().pushed.empty()) return fail("__cudaPopCallConfiguration", cudaErrorInvalidValue);
  LaunchConfig top = self().pushed.back();
  self().pushed.pop_back();
  *grid = top.grid, *block = top.block, *shared = top.shared, *(cudaStream_t*)stream = top.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared,
                                   cudaStream_t stream) {
  Call call_("cudaLaunchKernel");
  return launch(call_.api, kernel, grid, block, shared, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                 cudaStream_t stream) {
  ENTER();
  return launch(call_.api, function, grid, block, shared, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  Call call_("cudaLaunchKernel");
  return launch(call_.api, function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared,
                                            cudaStream_t stream) {
  Call call_("cudaLaunchKernel");
  return launch(call_.api, function, grid, block, shared, stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* function) {
  ENTER();
  if (!state().kernels.count(function)) FAIL(cudaErrorInvalidDeviceFunction);
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = MOST_THREADS, a->numRegs = 32, a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = MOST_SHARED;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int) {
  ENTER();
  return state().kernels.count(function) ? cudaSuccess : fail(call_.api, cudaErrorInvalidDeviceFunction);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int size, size_t,
                                                                       unsigned) {
  return *blocks = std::max(1, std::min(32, 2048 / std::max(1, size))), cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int size,
                                                              size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared, 0);
}
// Functions of the driver are asked for by name.
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *out = library ? dlsym(library, symbol) : nullptr;
  if (!*out) unsupported((std::string("driver entry point ") + symbol).c_str());
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? cudaSuccess : fail("cudaGetDriverEntryPointByVersion", cudaErrorNotSupported, symbol);
}
