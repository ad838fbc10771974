#include "ops.h"

#if defined(HEADRACE_HAS_AMX)

#define HEADRACE_ISA amx
#define HEADRACE_ISA_NAME "amx"
#include "target_avx512.h"

#include "attention_amx.h"
#include "linear_amx.h"

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
