// What ctypes calls. Every pointer to numbers is the caller's; nothing here allocates for it or keeps it.
#pragma once

#include "ops.h"
#include "team.h"

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

// The operations for the instruction set called `name`, or null if this machine (or this build) has no such one.
HEADRACE_API const headrace::Ops* headrace_ops(const char* name);

HEADRACE_API headrace::Team* headrace_team_create(int threads);
HEADRACE_API void headrace_team_destroy(headrace::Team* team);

HEADRACE_API void headrace_float_to_bf16(const headrace::Ops* ops, const float* from, uint16_t* to, int64_t count);
HEADRACE_API void headrace_bf16_to_float(const headrace::Ops* ops, const uint16_t* from, float* to, int64_t count);
HEADRACE_API void headrace_float_to_f16(const headrace::Ops* ops, const float* from, uint16_t* to, int64_t count);
HEADRACE_API void headrace_f16_to_float(const headrace::Ops* ops, const uint16_t* from, float* to, int64_t count);
HEADRACE_API void headrace_exponential(const headrace::Ops* ops, const float* from, float* to, int64_t count);
