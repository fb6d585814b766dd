// Kernels: registered by the constructors of libraries that nvcc compiled, and launched by their
// host functions.
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace hostcuda {

namespace {
constexpr size_t MOST_SHARED = 232448, MOST_THREADS = 1024;

// -- kernels that were compiled for the host, too
// -------------------------------------------------------------

using Run = void(void* const* arguments, unsigned grid_x, unsigned grid_y, unsigned threads);
struct HostKernel {
  Run* run;
  std::vector<size_t> sizes;  // of the arguments
};

std::map<std::string, HostKernel>& host_kernels() {
  static auto* all = new std::map<std::string, HostKernel>;
  return *all;
}

// The name of a kernel without what it returns and takes, which a type that stands for it may not
// have.
std::string plain_name(const char* mangled) {
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
  std::string name = demangled ? demangled : mangled;
  free(demangled);
  if (const std::string type = "on_host::Kernel<&"; name.rfind(type, 0) == 0) {
    name = name.substr(type.size(), name.rfind(", ") - type.size());
    if (name[0] == '(' && name.back() == ')') name = name.substr(1, name.size() - 2);
  }
  if (name.back() == ')') {
    size_t at = name.size();
    int open = 0;
    do {
      --at;
      open += name[at] == ')' ? 1 : name[at] == '(' ? -1 : 0;
    } while (open && at);
    name.resize(at);
  }
  return name.rfind("void ", 0) ? name : name.substr(5);
}

const HostKernel* host_kernel(const char* mangled) {
  static auto* known = new std::unordered_map<const char*, const HostKernel*>;
  if (host_kernels().empty()) return nullptr;
  auto [it, is_new] = known->emplace(mangled, nullptr);
  if (is_new) {
    auto found = host_kernels().find(plain_name(mangled));
    if (found != host_kernels().end()) it->second = &found->second;
    else if (strstr(mangled, "9shardgrad"))
      finding(std::string("not compiled for the host: ") + mangled);
  }
  return it->second;
}

using Words = std::vector<std::vector<uint64_t>>;  // a vector for each argument

// Runs the kernel with the arguments as they are now. What looks like an address of the device is
// one, and has to be allocated whenever the work is launched.
std::function<Body()> with_arguments(
    const HostKernel& kernel, const char* name, void** args, dim3 grid, dim3 block) {
  auto words = std::make_shared<Words>();
  for (size_t i = 0; i < kernel.sizes.size(); ++i) {
    words->emplace_back((kernel.sizes[i] + 7) / 8);
    memcpy(words->back().data(), args[i], kernel.sizes[i]);
  }
  return [=, run = kernel.run]() -> Body {
    ++state().calls["kernel that runs"];
    auto moved = std::make_shared<Words>(*words);
    for (auto& argument : *moved)
      for (uint64_t& word : argument) {
        auto* pointer = reinterpret_cast<void*>(word);
        if (!is_device_address(pointer)) continue;
        if (!is_allocated(pointer))
          finding(plain_name(name) + " is given memory that is not allocated");
        word = reinterpret_cast<uint64_t>(on_host(pointer));
      }
    return [=] {
      std::vector<void*> pointers;
      for (auto& argument : *moved) pointers.push_back(argument.data());
      try {
        run(pointers.data(), grid.x, grid.y, block.x);
      } catch (const std::exception& error) { finding(plain_name(name) + ": " + error.what()); }
      return true;
    };
  };
}

// -- launches
// -------------------------------------------------------------------------------------------------

cudaError_t launch(
    const char* api, const void* function, dim3 grid, dim3 block, void** args, size_t shared,
    cudaStream_t stream) {
  Stream* s = find(stream);
  if (!s) return fail(api, cudaErrorInvalidResourceHandle, "unknown stream");
  if (s->device != self().device)
    return fail(api, cudaErrorInvalidResourceHandle, "a stream of another device");
  auto found = state().kernels.find(function);
  if (found == state().kernels.end()) return fail(api, cudaErrorInvalidDeviceFunction);
  const size_t threads = size_t(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || !threads || threads > MOST_THREADS || grid.y > 65535 ||
      grid.z > 65535 || shared > MOST_SHARED)
    return fail(api, cudaErrorInvalidConfiguration, found->second);
  char config[120];
  snprintf(
      config, sizeof config, "%ux%ux%u/%ux%ux%u/%zu", grid.x, grid.y, grid.z, block.x, block.y,
      block.z, shared);
  Work work{"kernel", found->second, config};
  if (const HostKernel* kernel = host_kernel(found->second)) {
    work.start = with_arguments(*kernel, found->second, args, grid, block);
    work.computes = true;
  } else if (is_barrier(found->second)) {
    work.start = barrier_of(args, &work.in_line);
    work.computes = true;
  }
  return give(api, s, std::move(work));
}

std::pair<void*, size_t>* variable(const void* symbol) {
  auto found = state().variables.find(symbol);
  if (found == state().variables.end()) return nullptr;
  if (!found->second.first)
    allocate("variable", &found->second.first, found->second.second, self().device);
  return &found->second;
}
}  // namespace

}  // namespace hostcuda

using namespace hostcuda;

API void** __cudaRegisterFatBinary(void* binary) { return new void*[2]{binary, nullptr}; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
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
API cudaError_t cudaMemcpyToSymbol(
    const void* symbol, const void* src, size_t size, size_t offset, cudaMemcpyKind) {
  ENTER();
  TRY(unsafe(call_.api));
  auto* found = variable(symbol);
  if (!found) FAIL(cudaErrorInvalidValue);
  return copy(call_.api, (char*)found->first + offset, src, size, find(nullptr));
}
API unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
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
API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  Call call_("cudaLaunchKernel");
  return launch(call_.api, kernel, grid, block, args, shared, stream);
}
API cudaError_t cudaLaunchKernel(
    const void* function, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  ENTER();
  return launch(call_.api, function, grid, block, args, shared, stream);
}
API cudaError_t
cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
  Call call_("cudaLaunchKernel");
  return launch(
      call_.api, function, config->gridDim, config->blockDim, args, config->dynamicSmemBytes,
      config->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  Call call_("cudaLaunchKernel");
  return launch(call_.api, function, grid, block, args, shared, stream);
}
API void hostcuda_add_kernel(const char* type, Run* run, const size_t* sizes, size_t count) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  host_kernels()[plain_name(type)] = {run, {sizes, sizes + count}};
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
  return state().kernels.count(function) ? cudaSuccess
                                         : fail(call_.api, cudaErrorInvalidDeviceFunction);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int size, size_t, unsigned) {
  return *blocks = std::max(1, std::min(32, 2048 / std::max(1, size))), cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void* function, int size, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, size, shared, 0);
}
// Functions of the driver are asked for by name.
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** out, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *out = library ? dlsym(library, symbol) : nullptr;
  if (!*out) unsupported((std::string("driver entry point ") + symbol).c_str());
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? cudaSuccess
              : fail("cudaGetDriverEntryPointByVersion", cudaErrorNotSupported, symbol);
}
