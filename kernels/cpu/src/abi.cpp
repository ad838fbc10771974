#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using headrace::LinearJob;
using headrace::Ops;
using headrace::Row;
using headrace::Team;
using headrace::Weights;

namespace {

#if defined(HEADRACE_HAS_AMX)
// Whether the machine has AMX for bf16 and integers, and the system lets this process use it: it has to be asked once.
bool may_use_amx() {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
#if defined(__linux__)
    constexpr long kAskForState = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}
#endif

} // namespace

int32_t headrace_abi_version() { return kAbiVersion; }

const Ops* headrace_ops(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#if defined(HEADRACE_HAS_AMX)
    if (!std::strcmp(name, "amx")) return has_avx512 && may_use_amx() ? &headrace::amx::ops : nullptr;
#endif
    if (!std::strcmp(name, "avx512")) return has_avx512 ? &headrace::avx512::ops : nullptr;
    if (!std::strcmp(name, "avx2")) {
        bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        return has ? &headrace::avx2::ops : nullptr;
    }
#endif
    return std::strcmp(name, "portable") ? nullptr : &headrace::portable::ops;
}

Team* headrace_team_create(int threads) {
    try {
        return new Team(threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}
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

void headrace_quantize(const Ops* ops, const float* from, int64_t rows, int64_t count, int group, int8_t* to,
                       float* scales, int32_t* offsets) {
    const int64_t groups = (count + group - 1) / group;
    for (int64_t row = 0; row < rows; row++)
        ops->quantize_row(from + row * count, count, group, to + row * groups * group, scales + row * groups,
                          offsets + row * groups);
}
void headrace_quantize_bf16(const Ops* ops, const uint16_t* from, int64_t rows, int64_t count, int group, int8_t* to,
                            float* scales, int32_t* offsets) {
    const int64_t groups = (count + group - 1) / group;
    for (int64_t row = 0; row < rows; row++)
        ops->quantize_row_bf16(from + row * count, count, group, to + row * groups * group, scales + row * groups,
                               offsets + row * groups);
}

void headrace_linear(const Ops* ops, Team* team, const LinearJob* job) { ops->linear_job(*team, *job); }

int64_t headrace_read_bytes(const Ops* ops, Team* team, const uint8_t* bytes, int64_t count) {
    return ops->read_bytes(*team, bytes, count);
}
int64_t headrace_multiply_registers(const Ops* ops, Team* team, int32_t format, int64_t rounds) {
    return ops->multiply_registers(*team, headrace::Format(format), rounds);
}

int64_t headrace_packed_bytes(const Weights* weights) { return weights->total_bytes(); }
void headrace_struct_bytes(int64_t* weights, int64_t* row, int64_t* linear_job) {
    *weights = sizeof(Weights);
    *row = sizeof(Row);
    *linear_job = sizeof(LinearJob);
}
void headrace_pack(Team* team, const Weights* to, const Row* rows, uint8_t* bytes) {
    headrace::pack(*team, *to, rows, bytes);
}
void headrace_unpack_row(const Weights* weights, int64_t output, float* to) { headrace::unpack_row(*weights, output, to); }
void headrace_measure_screen(Team* team, const Weights* exact, const Weights* screen, float* errors, float* norms) {
    headrace::measure_screen(*team, *exact, *screen, errors, norms);
}
