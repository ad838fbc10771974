// One step of a whole model, on every worker of a team at once.
//
// A step is a list of phases. In each phase the workers claim shares of the same work, and a barrier ends it where the
// next phase reads what others wrote:
//
//   embed | norm, qkv | rotary | attention | output + residual | norm, gate_up | down + residual | ... | norm, head
//         '-------------------------------- each layer ---------------------------------------'
//
// Where there are many rows of many requests, each worker takes its own requests through all layers instead: nobody waits,
// and no core reads what another has written. Then it begins with the head of its own greedy rows, and whoever has ended
// first helps with the others'.
//
// The inputs of a product are a phase of their own if there are many rows; each worker makes them for itself if there
// are few. Only rows that are sampled go on after the last attention.
#pragma once

#include "step_head.h"
#include "step_layers.h"

namespace headrace::HEADRACE_ISA {

// Every worker of `team` calls this.
inline void step(Step& step, Team& team, int worker) {
    with_element(step.model.heads.is_float, [&](auto type) {
        using Own = Layers<decltype(type)>;
        if (step.shares_used == 1) {
            Own(step, team, worker, step.shares[0]).compute();
        } else {
            Own(step, *step.alone[size_t(worker)], worker, step.shares[size_t(worker)]).compute();
        }
    });
    Head(step, team, worker).choose();
}

} // namespace headrace::HEADRACE_ISA
