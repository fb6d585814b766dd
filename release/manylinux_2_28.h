// Included before each source of a wheel: what its library takes from glibc and libstdc++ is then
// in the versions of manylinux_2_28, whatever those of the machine are that builds it.
#pragma once
#include <sstream>

// Compiled here: libstdc++ itself has their constructors only from gcc 9 on.
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

// Whether one thread runs, so that shared pointers count without atomics: in glibc from 2.32 on.
// Here they never do.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}

// What glibc 2.29 changed is how errors are told.
#if defined(__x86_64__)
__asm__(".symver pow,pow@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pow,pow@GLIBC_2.17");
#endif
