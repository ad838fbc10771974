#if defined(__x86_64__)
#include "ops.h"

#define HEADRACE_ISA avx2
#define HEADRACE_ISA_NAME "avx2"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"
#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
