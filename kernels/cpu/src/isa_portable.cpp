#include "ops.h"

#define HEADRACE_ISA portable
#define HEADRACE_ISA_NAME "portable"

#include "simd_portable.h"
#include "table.h"
