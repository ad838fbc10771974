// The operations of one instruction set, as a table: everything above it calls through this.
//
// The isa_*.cpp include this before they switch their instructions on, and with it every header whose inline functions
// are shared by the whole library: see base.h.
#pragma once

#include "attention_plan.h"
#include "base.h"
#include "half.h"
#include "linear_job.h"
#include "lora_types.h"
#include "pack.h"
#include "step_state.h"
#include "team.h"
#include "sampling_types.h"

namespace headrace {

struct Ops {
    const char* name;
    // From so many rows for each worker on, it is worth reading all weights for each of them.
    int64_t dealt_rows;
    void (*float_to_bf16)(const float* from, uint16_t* to, int64_t count);
    void (*bf16_to_float)(const uint16_t* from, float* to, int64_t count);
    void (*float_to_f16)(const float* from, uint16_t* to, int64_t count);
    void (*f16_to_float)(const uint16_t* from, float* to, int64_t count);
    void (*exponential)(const float* from, float* to, int64_t count);
    void (*embed)(const void* table, bool is_float, const int32_t* ids, int64_t rows, int64_t size, float* out);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t rows, int64_t size, void* out, bool is_float);
    void (*add_rows)(float* residual, const void* x, bool is_float, int64_t count);
    void (*silu_and_mul)(const void* gate_up, int64_t rows, int64_t size, void* out, bool is_float);
    void (*add_adapters)(const Adapters& adapters, const int32_t* adapter, const void* x, int64_t inputs, void* out,
                         int64_t outputs, int64_t begin, int64_t end, float* scratch, bool is_float);
    void (*rotary_kv_write)(const StepShape& step, const HeadShape& heads, const RotaryLayer& layer, int64_t begin,
                            int64_t end);
    void (*attend)(AttentionPlan& plan, const StepShape& step, const HeadShape& heads, const AttentionLayer& layer,
                   Team& team, int worker);
    void (*quantize_row)(const float* from, int64_t count, int group, int8_t* to, float* scales, int32_t* offsets);
    void (*quantize_row_bf16)(const uint16_t* from, int64_t count, int group, int8_t* to, float* scales, int32_t* offsets);
    void (*linear_job)(Team& team, const LinearJob& job);
    // Every worker of the team calls it.
    void (*step)(Step& step, Team& team, int worker);
    void (*sample)(const SamplingRow& row, const float* logits, int64_t vocab, void* memory, SampledRow& out,
                   int32_t* top_ids, double* top_logprobs);
    int64_t (*read_bytes)(Team& team, const uint8_t* bytes, int64_t count);
    int64_t (*multiply_registers)(Team& team, Format format, int64_t rounds);
};

#if defined(HEADRACE_HAS_AMX)
namespace amx {
extern const Ops ops;
}
#endif
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
