// What ctypes calls of the operations between the matrix products, each alone. Rows are shared among the team.
#pragma once

#include "abi.h"
#include "copy.h"
#include "thin.h"

static_assert(sizeof(headrace::HeadShape) == 28 && sizeof(headrace::StepShape) == 56);
static_assert(sizeof(headrace::Adapters) == 32);
static_assert(sizeof(headrace::SamplingRow) == 136 && sizeof(headrace::SampledRow) == 16);
static_assert(sizeof(headrace::RotaryLayer) == 80 && sizeof(headrace::AttentionLayer) == 48);
static_assert(sizeof(headrace::ThinWork) == 56);

HEADRACE_API void headrace_embed(const headrace::Ops* ops, headrace::Team* team, const void* table, int32_t is_float,
                                 const int32_t* ids, int64_t rows, int64_t size, float* out);
HEADRACE_API void headrace_rms_norm(const headrace::Ops* ops, headrace::Team* team, const float* x, const float* weight,
                                    float eps, int64_t rows, int64_t size, void* out, int32_t is_float);
HEADRACE_API void headrace_add_rows(const headrace::Ops* ops, headrace::Team* team, float* residual, const void* x,
                                    int32_t is_float, int64_t rows, int64_t size);
HEADRACE_API void headrace_silu_and_mul(const headrace::Ops* ops, headrace::Team* team, const void* gate_up,
                                        int64_t rows, int64_t size, void* out, int32_t is_float);
// Adds to out [rows][outputs] what the rows' adapters (counted from 1, 0 for none) make of x [rows][inputs].
HEADRACE_API void headrace_add_adapters(const headrace::Ops* ops, headrace::Team* team, const headrace::Adapters* adapters,
                                        const int32_t* adapter, const void* x, int64_t inputs, void* out, int64_t outputs,
                                        int64_t rows, int32_t is_float);
HEADRACE_API void headrace_rotary_kv_write(const headrace::Ops* ops, headrace::Team* team,
                                           const headrace::StepShape* step, const headrace::HeadShape* heads,
                                           const headrace::RotaryLayer* layer);
HEADRACE_API void headrace_paged_attention(const headrace::Ops* ops, headrace::Team* team,
                                           const headrace::StepShape* step, const headrace::HeadShape* heads,
                                           const headrace::AttentionLayer* layer);

// Memory that sampling needs for each worker, all zero before the first call.
HEADRACE_API int64_t headrace_sampling_bytes(int64_t vocab);
// [rows] of logits [vocab]; `top_ids` and `top_logprobs` are [rows, most_top].
HEADRACE_API void headrace_sample(const headrace::Ops* ops, headrace::Team* team, const headrace::SamplingRow* rows,
                                  int64_t count, const float* logits, int64_t vocab, void* memory,
                                  headrace::SampledRow* out, int32_t* top_ids, double* top_logprobs, int64_t most_top);

// Copies whole pages; sources and targets may not overlap.
HEADRACE_API void headrace_copy_pages(headrace::Team* team, const headrace::PageMove* moves, int64_t count,
                                      int64_t page_bytes);

// Thins one request's context in place.
HEADRACE_API void headrace_thin(headrace::Team* team, const headrace::HeadShape* heads, const headrace::ThinWork* work,
                                uint8_t* arena);
