// What ctypes calls of the operations between the matrix products, each alone. Rows are shared among the team.
#pragma once

#include "abi.h"

static_assert(sizeof(headrace::HeadShape) == 24 && sizeof(headrace::StepShape) == 56);
static_assert(sizeof(headrace::RotaryLayer) == 80 && sizeof(headrace::AttentionLayer) == 48);

HEADRACE_API void headrace_embed(const headrace::Ops* ops, headrace::Team* team, const void* table, int32_t is_float,
                                 const int32_t* ids, int64_t rows, int64_t size, float* out);
HEADRACE_API void headrace_rms_norm(const headrace::Ops* ops, headrace::Team* team, const float* x, const float* weight,
                                    float eps, int64_t rows, int64_t size, void* out, int32_t is_float);
HEADRACE_API void headrace_add_rows(const headrace::Ops* ops, headrace::Team* team, float* residual, const void* x,
                                    int32_t is_float, int64_t rows, int64_t size);
HEADRACE_API void headrace_silu_and_mul(const headrace::Ops* ops, headrace::Team* team, const void* gate_up,
                                        int64_t rows, int64_t size, void* out, int32_t is_float);
HEADRACE_API void headrace_rotary_kv_write(const headrace::Ops* ops, headrace::Team* team,
                                           const headrace::StepShape* step, const headrace::HeadShape* heads,
                                           const headrace::RotaryLayer* layer);
HEADRACE_API void headrace_paged_attention(const headrace::Ops* ops, headrace::Team* team,
                                           const headrace::StepShape* step, const headrace::HeadShape* heads,
                                           const headrace::AttentionLayer* layer);
