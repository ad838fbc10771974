// Switches AVX-512 with BF16 and VNNI on for all functions that follow in an isa_*.cpp, and brings its vector layer. With
// clang the file has to end with `#pragma clang attribute pop`.
#pragma once

#if defined(__clang__)
#pragma clang attribute push(                                                                                          \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif

#include "simd_avx512.h"
