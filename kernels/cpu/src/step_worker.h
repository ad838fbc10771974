// One worker's part in the phases of a step: what the layers and the head have in common.
#pragma once

#include "linear.h"
#include "quantize.h"
#include "step_state.h"

namespace headrace::HEADRACE_ISA {

// A row of a source as floats or bf16; the word that the last element begins is filled up with zeros.
template <class As, class Source>
HEADRACE_INLINE void write_elements(const Source& source, int64_t size, uint8_t* to) {
    auto* out = reinterpret_cast<typename As::Element*>(to);
    for_vectors(size, [&](int64_t i, int n) { As::write(out + i, source.read(i, n), n); });
    if (size % As::kPerWord) out[size] = 0;
}

// A row of a source as int8 in groups.
template <class Source>
HEADRACE_INLINE void write_integers(const Source& source, const Weights& weights, int64_t row, const Activations& to) {
    const int group = layout_of(weights.format).scale_inputs;
    const int64_t first_group = row * weights.groups();
    int8_t* out = reinterpret_cast<int8_t*>(const_cast<uint8_t*>(to.values) + row * to.stride_bytes);
    quantize(source, weights.inputs, group, out, const_cast<float*>(to.scales) + first_group,
             const_cast<int32_t*>(to.offsets) + first_group);
}

// One row of a source as the weights want it.
template <class Source>
HEADRACE_INLINE void write_inputs(const Weights& weights, const Source& source, int64_t row, const Activations& to) {
    uint8_t* values = const_cast<uint8_t*>(to.values) + row * to.stride_bytes;
    switch (weights.format) {
    case Format::kF32: return write_elements<F32>(source, weights.inputs, values);
    case Format::kBf16: return write_elements<Bf16>(source, weights.inputs, values);
    default: return write_integers(source, weights, row, to);
    }
}

class StepWorker {
  protected:
    using Rows = Range; // of the step

    // `share` is what is computed with all of `team`.
    StepWorker(Step& step, Team& team, int worker, const StepShare& share)
        : step_(step), model_(step.model), team_(team), worker_(worker), member_(team.size() > 1 ? worker : 0),
          watch_(step, worker), residual_(step.residual.as<float>()),
          kv_ahead_(share.pages.data(), int64_t(share.pages.size()), model_.layer_bytes, member_, team.size()) {}

    // Waits for all workers at the end of a phase.
    void end(Phase phase) {
        lead_.fetch();
        team_.barrier();
        watch_.lap(phase);
    }

    // Rows of a source times weights, plus a bias if there is one, into an epilogue.
    template <class Source, class Epilogue>
    void multiply_rows(const Weights& weights, const float* bias, Rows rows, Source source, Epilogue epilogue) {
        multiply(weights, bias, inputs_of(weights, rows, source), rows, epilogue);
    }

    // `x` begins with the first of the rows.
    template <class Epilogue>
    void multiply(const Weights& weights, const float* bias, const Activations& x, Rows rows, Epilogue epilogue) {
        const auto at = [=](int64_t row, int64_t column, float* sums, int count) {
            epilogue(rows.begin + row, column, sums, count);
        };
        if (bias) {
            linear(team_, member_, weights, x, rows.end - rows.begin, AddBias<decltype(at)>{bias, at}, kv_ahead_);
        } else {
            linear(team_, member_, weights, x, rows.end - rows.begin, at, kv_ahead_);
        }
    }

    // Few rows: each worker has its own copy, and nobody waits.
    template <class Source> Activations inputs_of(const Weights& weights, Rows rows, Source source) {
        const int64_t count = rows.end - rows.begin;
        const bool own = count <= kOwnRows;
        const Activations to = inputs_at(weights, rows, own);
        write_rows(own, count, [&](int64_t row) { write_inputs(weights, source(rows.begin + row), row, to); });
        return to;
    }

    // Where the inputs of a product's rows stand.
    Activations inputs_at(const Weights& weights, Rows rows, bool own) const {
        return own ? step_.own_inputs[worker_].shaped(weights.format, weights.inputs)
                   : step_.inputs.shaped(weights.format, weights.inputs, rows.begin);
    }

    // Writes the inputs of a product, by each worker for itself or by all together.
    template <class Write> void write_rows(bool own, int64_t count, const Write& write) {
        if (own) {
            for (int64_t row = 0; row < count; row++) write(row);
            return;
        }
        while (Range mine = team_.claim(member_, count)) {
            for (int64_t row = mine.begin; row < mine.end; row++) write(row);
        }
        end(Phase::kNorm);
    }

    Step& step_;
    const StepModel& model_;
    Team& team_;
    const int worker_; // of the step
    const int member_; // of the team
    Stopwatch watch_;
    float* residual_;
    Ahead kv_ahead_; // what the next attention reads
    Lead lead_;
};

} // namespace headrace::HEADRACE_ISA
