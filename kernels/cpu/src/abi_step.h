// What ctypes calls of a whole model.
#pragma once

#include "abi.h"
#include "step_state.h"

static_assert(sizeof(headrace::StepLayer) == 320 && sizeof(headrace::StepModel) == 216 &&
              sizeof(headrace::StepSampling) == 40);

// Memory for the steps of a model, of up to `most_rows` rows, or null if there isn't enough. The weights stay the caller's and have to outlive it.
HEADRACE_API headrace::Step* headrace_step_create(const headrace::StepModel* model, const headrace::StepLayer* layers,
                                                  int32_t threads, int64_t most_rows);
HEADRACE_API void headrace_step_destroy(headrace::Step* step);

// Runs one step: `work` as StepWork describes it, the arena's first byte, [samples] for the chosen tokens, and the rows
// that are more than greedy.
HEADRACE_API void headrace_step_run(const headrace::Ops* ops, headrace::Team* team, headrace::Step* step,
                                    const int32_t* work, uint8_t* kv, int32_t* tokens,
                                    const headrace::StepSampling* sampling);

// [kPhases] seconds of worker 0 in each phase since the last call, which is what starts the counting.
HEADRACE_API void headrace_step_seconds(headrace::Step* step, double* seconds);
