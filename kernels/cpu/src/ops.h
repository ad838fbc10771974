// The operations of one instruction set, as a table: everything above it calls through this.
#pragma once

#include "base.h"

namespace headrace {

class Team;

struct Ops {
    const char* name;
    void (*float_to_bf16)(const float* from, uint16_t* to, int64_t count);
    void (*bf16_to_float)(const uint16_t* from, float* to, int64_t count);
    void (*float_to_f16)(const float* from, uint16_t* to, int64_t count);
    void (*f16_to_float)(const uint16_t* from, float* to, int64_t count);
    void (*exponential)(const float* from, float* to, int64_t count);
};

#if defined(__x86_64__)
namespace avx512 {
extern const Ops ops;
}
namespace avx2 {
extern const Ops ops;
}
#endif
namespace portable {
extern const Ops ops;
}

} // namespace headrace
