#include "ops.h"

#if defined(HEADRACE_HAS_AMX)

#define HEADRACE_ISA amx
#define HEADRACE_ISA_NAME "amx"
#if defined(__clang__)
#pragma clang attribute push(                                                                                          \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif

#include "simd_avx512.h"
#include "attention_amx.h"
#include "linear_amx.h"

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
