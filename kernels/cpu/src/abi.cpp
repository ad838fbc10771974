#include "abi.h"

using headrace::Ops;
using headrace::Team;

const Ops* headrace_ops(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!std::strcmp(name, "avx512")) {
        bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
        return has ? &headrace::avx512::ops : nullptr;
    }
    if (!std::strcmp(name, "avx2")) {
        bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        return has ? &headrace::avx2::ops : nullptr;
    }
#endif
    return std::strcmp(name, "portable") ? nullptr : &headrace::portable::ops;
}

Team* headrace_team_create(int threads) { return new Team(threads); }
void headrace_team_destroy(Team* team) { delete team; }

void headrace_float_to_bf16(const Ops* ops, const float* from, uint16_t* to, int64_t count) {
    ops->float_to_bf16(from, to, count);
}
void headrace_bf16_to_float(const Ops* ops, const uint16_t* from, float* to, int64_t count) {
    ops->bf16_to_float(from, to, count);
}
void headrace_float_to_f16(const Ops* ops, const float* from, uint16_t* to, int64_t count) {
    ops->float_to_f16(from, to, count);
}
void headrace_f16_to_float(const Ops* ops, const uint16_t* from, float* to, int64_t count) {
    ops->f16_to_float(from, to, count);
}
void headrace_exponential(const Ops* ops, const float* from, float* to, int64_t count) {
    ops->exponential(from, to, count);
}
