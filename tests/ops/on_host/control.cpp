// What tests, and the runtime of tests/cuda_runtime, ask of the machine that runs the kernels.
#include "cuda_runtime.h"

// Only these blocks of each row run from now on; all, if there are none.
extern "C" void on_host_only_blocks(const unsigned* blocks, size_t count) {
  on_host::only.assign(blocks, blocks + count);
}

// Before the first update, which remembers how many blocks are resident.
extern "C" void on_host_processors(int count) { on_host::processors = count; }

// Names all kernels: each by the name of a type, `on_host::Kernel<&kernel, ...>`.
extern "C" void on_host_name_kernels(
    void (*name)(const char*, on_host::Run*, const size_t* sizes, size_t count)) {
  for (const auto& [type, kernel] : on_host::kernels())
    name(type, kernel.run, kernel.sizes.data(), kernel.sizes.size());
}
