// The simulated devices' memory and random numbers as torch sees them.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

#include <functional>

namespace simulated {

c10::Allocator* allocator();

// Returns the CPU generator behind a device's default one, or behind `given`.
at::Generator cpu_generator(int device);
at::Generator cpu_generator(const at::Generator& given);

// Remembers where a device's random numbers, and the host's, are now; the result goes back there.
std::function<void()> remember_generators(int device);

}  // namespace simulated
