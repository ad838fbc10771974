// What every file of the library starts with: the standard headers, and how inlining and unrolling are asked for.
//
// An isa_*.cpp includes this before it switches its instruction set on. A standard function that is compiled inline is
// therefore always compiled for the baseline: the linker keeps one copy of it for the whole library, and must not keep
// one that only some machines can run.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// A compiler that knows AMX comes with an assembler that does.
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxtileintrin.h>)
#define HEADRACE_HAS_AMX 1
#endif
#endif

#define HEADRACE_INLINE inline __attribute__((always_inline))
// GCC leaves accumulator arrays in memory unless the loops over them are unrolled completely.
#define HEADRACE_UNROLL _Pragma("GCC unroll 32")

namespace headrace {

// Fetches a line into the second-level cache. The first level has room for fewer misses at a time, which would set the
// speed of whatever streams through memory.
HEADRACE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

} // namespace headrace
