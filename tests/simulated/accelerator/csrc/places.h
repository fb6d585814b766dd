// Where in the program something was launched from, and the names of ops: strings as small numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace simulated {

int32_t intern(const std::string& text);
std::string text_of(int32_t number);

// Returns the innermost Python frame of this thread that is neither torch's nor the simulator's, as
// "file:line:function"; without one, the autograd node that is running. Takes the GIL: call it
// while holding no lock.
int32_t current_place();

// Files whose name starts with one of these are passed over.
void set_ignored_files(std::vector<std::string> prefixes);

}  // namespace simulated
