// What ctypes calls. Every pointer to numbers is the caller's; nothing here allocates for it or keeps it.
#pragma once

#include "ops.h"
#include "pack.h"
#include "screen_types.h"

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

// Rises with every change of what crosses this border, so that a library and a package of different ages never meet.
constexpr int32_t kAbiVersion = 5;
HEADRACE_API int32_t headrace_abi_version();

// The operations for the instruction set called `name`, or null if this machine (or this build) has no such one.
HEADRACE_API const headrace::Ops* headrace_ops(const char* name);

// Null if the system doesn't start so many threads.
HEADRACE_API headrace::Team* headrace_team_create(int threads);
HEADRACE_API void headrace_team_destroy(headrace::Team* team);

HEADRACE_API void headrace_float_to_bf16(const headrace::Ops* ops, const float* from, uint16_t* to, int64_t count);
HEADRACE_API void headrace_bf16_to_float(const headrace::Ops* ops, const uint16_t* from, float* to, int64_t count);
HEADRACE_API void headrace_float_to_f16(const headrace::Ops* ops, const float* from, uint16_t* to, int64_t count);
HEADRACE_API void headrace_f16_to_float(const headrace::Ops* ops, const uint16_t* from, float* to, int64_t count);
HEADRACE_API void headrace_exponential(const headrace::Ops* ops, const float* from, float* to, int64_t count);

// Activations as int8 with groups: see quantize.h. [rows][count] in, [rows][padded to whole groups] out.
HEADRACE_API void headrace_quantize(const headrace::Ops* ops, const float* from, int64_t rows, int64_t count, int group,
                                    int8_t* to, float* scales, int32_t* offsets);
HEADRACE_API void headrace_quantize_bf16(const headrace::Ops* ops, const uint16_t* from, int64_t rows, int64_t count,
                                         int group, int8_t* to, float* scales, int32_t* offsets);

HEADRACE_API void headrace_linear(const headrace::Ops* ops, headrace::Team* team, const headrace::LinearJob* job);

// What the machine can do at best: see limits.h.
HEADRACE_API int64_t headrace_read_bytes(const headrace::Ops* ops, headrace::Team* team, const uint8_t* bytes,
                                         int64_t count);
HEADRACE_API int64_t headrace_multiply_registers(const headrace::Ops* ops, headrace::Team* team, int32_t format,
                                                 int64_t rounds);

// How many bytes `weights` takes, and whether the two sides agree on the sizes of what they exchange.
HEADRACE_API int64_t headrace_packed_bytes(const headrace::Weights* weights);
HEADRACE_API void headrace_struct_bytes(int64_t* weights, int64_t* row, int64_t* linear_job);
HEADRACE_API void headrace_pack(headrace::Team* team, const headrace::Weights* to, const headrace::Row* rows,
                                uint8_t* bytes);
// What an 8-bit head can be off by: see screen_types.h. [tiles * 32] floats each.
HEADRACE_API void headrace_measure_screen(headrace::Team* team, const headrace::Weights* exact,
                                          const headrace::Weights* screen, float* errors, float* norms);
HEADRACE_API void headrace_unpack_row(const headrace::Weights* weights, int64_t output, float* to);
