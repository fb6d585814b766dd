// What Python may ask for besides the simulator itself.
#pragma once

#include <functional>
#include <string>

namespace simulated {

// Gives every op of a namespace that exists now the CPU's kernel. Without it an op that has a
// reference for all devices would run that one, piece by piece.
void adopt_namespace(const std::string& name);

std::function<void()> remember_generators(int device);

// Collectives: see collectives.cpp.
int group_of(const std::string& name, int size, double timeout_s);
void abort_groups(const std::string& reason);
void forget_groups();

}  // namespace simulated
