#if defined(__x86_64__)
#include "ops.h"

#define HEADRACE_ISA avx512
#define HEADRACE_ISA_NAME "avx512"
#include "target_avx512.h"

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
