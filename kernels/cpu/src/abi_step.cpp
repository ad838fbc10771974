#include "abi_step.h"

using namespace headrace;

Step* headrace_step_create(const StepModel* model, const StepLayer* layers, int32_t threads, int64_t most_rows) {
    try {
        return new Step(*model, layers, threads, most_rows);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void headrace_step_destroy(Step* step) { delete step; }

void headrace_step_run(const Ops* ops, Team* team, Step* step, const int32_t* work, uint8_t* kv, int32_t* tokens,
                       const StepSampling* sampling) {
    step->begin(work, kv, tokens, *sampling, ops->dealt_rows);
    team->run([&](int worker) { ops->step(*step, *team, worker); });
}

void headrace_step_seconds(Step* step, double* seconds) {
    std::copy_n(step->seconds, kPhases, seconds);
    std::fill_n(step->seconds, kPhases, 0.0);
    step->timed = true;
}
