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

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "norm.h"
#include "pack.h"
#include "quantize.h"
#include "rotary.h"
#include "sampling.h"
#include "screen.h"
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

// T: what queries, keys, values and the activations between products are stored as.
template <class T> class StepWalk {
    using Element = typename T::Element;
    static constexpr Format kStored = std::is_same_v<T, F32> ? Format::kF32 : Format::kBf16;

    using Rows = Range; // of the step

  public:
    // `share` is what this worker computes, with all of `team`.
    StepWalk(Step& step, Team& team, int worker, StepShare& share)
        : step_(step), model_(step.model), team_(team), worker_(worker), member_(team.size() > 1 ? worker : 0), share_(share),
          rows_{share.begin, share.end}, watch_(step, worker), residual_(step.residual.as<float>()),
          attended_(step.attended.as<Element>()), gated_(step.gated.as<Element>()),
          kv_ahead_(share.pages.data(), int64_t(share.pages.size()), model_.layer_bytes, member_, team.size()) {}

    void layers() {
        kv_ahead_.start(step_.kv);
        embed();
        for (int64_t i = 0; i < model_.layers; i++) {
            attention(step_.layers[size_t(i)], i);
            mlp(step_.layers[size_t(i)], i);
        }
    }

    // The rows that only need their greatest logit never see the others' logits, nor do these see theirs.
    void choose() {
        const StepWork& work = step_.work;
        if (work.greedy == 0) {
            if (step_.shares_used > 1) team_.barrier();
        } else {
            const Format format = model_.head.format;
            if (!model_.screen.weights.bytes) {
                choose_greedy();
            } else if (format == Format::kF32) {
                choose_screened<F32, FormatF32>();
            } else {
                choose_screened<Bf16, FormatBf16>();
            }
        }
        const int64_t vocab = model_.head.outputs;
        float* logits = step_.logits.as<float>();
        for (int64_t first = work.greedy; first < work.samples; first += kLogitRows) {
            const int64_t rows = std::min(kLogitRows, work.samples - first);
            multiply_rows(model_.head, nullptr, {0, rows}, sampled(first), StoreFloat{logits, vocab});
            end(Phase::kHead);
            for (int64_t row = team_.claim_one(); row < rows; row = team_.claim_one()) {
                sample_row(first - work.greedy + row, logits + row * vocab);
            }
            end(Phase::kSample);
        }
    }

  private:
    void embed() {
        while (Range mine = team_.claim(member_, rows_.end - rows_.begin)) {
            for (int64_t row = rows_.begin + mine.begin; row < rows_.begin + mine.end; row++) {
                unpack_row(model_.embedding, step_.work.token_ids[row], residual_ + row * model_.hidden);
            }
        }
        end(Phase::kEmbed);
    }

    void attention(const StepLayer& layer, int64_t index) {
        const HeadShape& heads = model_.heads;
        const int64_t queries = heads.heads * heads.head_size, projected = layer.qkv.outputs;
        float* qkv = step_.qkv.as<float>();
        project_rows(layer.qkv, nullptr, layer.qkv_adapters, norm_of(layer.attention_norm), StoreFloat{qkv, projected});
        lead_to(layer.output);
        end(Phase::kQkv);

        uint8_t* kv = step_.kv + index * model_.layer_bytes;
        const int64_t q_stride = projected * int64_t(sizeof(float) / sizeof(Element));
        RotaryLayer rotary{qkv, qkv, kv, layer.qkv_bias, layer.q_norm, layer.k_norm, model_.cos_sin, projected, q_stride,
                           model_.norm_eps, 1};
        while (Range mine = team_.claim(member_, rows_.end - rows_.begin)) {
            rotary_kv_write(share_.shape, heads, rotary, rows_.begin + mine.begin, rows_.begin + mine.end);
        }
        end(Phase::kRotary);

        AttentionLayer attention{qkv, kv, attended_, q_stride, queries, model_.scale, heads.is_float};
        attend(share_.plan, share_.shape, heads, attention, team_, member_);
        end(Phase::kAttention);

        if (index + 1 < model_.layers) {
            kv_ahead_.start(kv + model_.layer_bytes);
        } else {
            keep_sampled(queries);
        }
        project_stored(layer.output, layer.output_bias, layer.output_adapters, attended_, add_to_residual());
        lead_to(layer.gate_up);
        end(Phase::kOutput);
    }

    void mlp(const StepLayer& layer, int64_t index) {
        project_rows(layer.gate_up, layer.gate_up_bias, layer.gate_up_adapters, norm_of(layer.mlp_norm),
                     SiluMultiply<Element>{gated_, model_.inner, model_.inner});
        lead_to(layer.down);
        end(Phase::kGateUp);
        project_stored(layer.down, layer.down_bias, layer.down_adapters, gated_, add_to_residual());
        lead_to(index + 1 < model_.layers ? step_.layers[size_t(index + 1)].qkv : model_.head);
        end(Phase::kDown);
    }

    // Nobody reads the others' last residuals: what is left of the step is done for the rows that are sampled.
    void keep_sampled(int64_t queries) {
        const std::vector<int32_t>& kept = share_.kept;
        if (int64_t(kept.size()) == rows_.end - rows_.begin) return;
        if (member_ == 0) {
            for (size_t i = 0; i < kept.size(); i++) { // in ascending order: row kept[i] is still whole
                const int64_t to = rows_.begin + int64_t(i);
                std::memmove(residual_ + to * model_.hidden, residual_ + kept[i] * model_.hidden,
                             size_t(model_.hidden) * sizeof(float));
                std::memmove(attended_ + to * queries, attended_ + kept[i] * queries, size_t(queries) * sizeof(Element));
                if (step_.work.adapted) step_.adapter_of_row[size_t(to)] = step_.adapter_of_row[size_t(kept[i])];
            }
        }
        rows_.end = rows_.begin + int64_t(kept.size());
        end(Phase::kAttention);
    }

    void sample_row(int64_t row, const float* logits) {
        const StepSampling& sampling = step_.sampling;
        SampledRow& out = sampling.chosen[row];
        const int64_t top = row * sampling.most_top;
        headrace::HEADRACE_ISA::sample(sampling.rows[row], logits, model_.head.outputs, step_.sampling_memory(worker_), out,
                                       sampling.top_ids + top, sampling.top_logprobs + top);
        step_.tokens[step_.work.greedy + row] = out.token;
    }

    // The greatest of what the workers found of a row.
    Best best_of(const Memory& found, int64_t row) const {
        Best best = Best::none();
        for (int worker = 0; worker < team_.size(); worker++) {
            const Best& one = found.as<Best>()[worker * step_.best_stride + row];
            best.take(one.value, one.index);
        }
        return best;
    }

    // What this worker finds of the greedy rows.
    Best* own_best(const Memory& found) const {
        Best* best = found.as<Best>() + worker_ * step_.best_stride;
        std::fill_n(best, step_.work.greedy, Best::none());
        return best;
    }

    void choose_best(const Memory& found) {
        if (worker_ != 0) return;
        for (int64_t row = 0; row < step_.work.greedy; row++) step_.tokens[step_.sample_at(row)] = best_of(found, row).index;
    }

    // Whether each worker prepares the greedy rows for itself.
    bool owns_greedy() const { return step_.shares_used == 1 && step_.work.greedy <= kOwnRows; }

    // Calls write(row) once for each greedy row, or on each worker if it owns them. Of its own share, each worker does it as
    // soon as it has computed the share.
    template <class Write> void write_greedy(const Write& write) {
        if (step_.shares_used == 1) return write_rows(owns_greedy(), step_.work.greedy, write);
        StepShare& mine = step_.shares[size_t(worker_)];
        for (int64_t row = mine.greedy.begin; row < mine.greedy.end; row++) write(row);
        mine.ready.advance();
    }

    // The greedy rows times the head or its screen. What each worker has claimed first is its own share.
    template <class Epilogue>
    void multiply_greedy(const Weights& weights, const Activations& x, const Epilogue& epilogue) {
        if (step_.shares_used == 1) {
            linear(team_, member_, weights, x, step_.work.greedy, epilogue, kv_ahead_);
        } else {
            const Passes passes{step_.shares_used, [&](int64_t index) {
                StepShare& share = step_.shares[size_t(index)];
                share.ready.wait_past(share.ready_before);
                return share.greedy;
            }};
            with_format(weights.format, [&](auto of) {
                linear_passes<decltype(of)>(team_, member_, weights, x, passes, epilogue, kv_ahead_);
            });
        }
        end(Phase::kHead);
    }

    void choose_greedy() {
        const Weights& head = model_.head;
        const InputRows& to = owns_greedy() ? step_.own_inputs[size_t(worker_)] : step_.head_inputs;
        const Activations x = to.shaped(head.format, model_.hidden);
        write_greedy([&, source = sampled(0)](int64_t row) { write_inputs(head, source(row), row, x); });
        multiply_greedy(head, x, KeepBest{own_best(step_.best)});
        choose_best(step_.best);
    }

    // As `choose_greedy` would, with most of the work done by the screen: see screen.h. `As` and `Of` are the head's.
    template <class As, class Of> void choose_screened() {
        const Weights &head = model_.head, &screen = model_.screen.weights;
        const int64_t rows = step_.work.greedy, tiles = head.tiles();
        const bool own = owns_greedy();
        const Activations exact =
            (own ? step_.own_inputs[size_t(worker_)] : step_.head_inputs).shaped(head.format, model_.hidden);
        const Activations rounded =
            (own ? step_.own_rounded[size_t(worker_)] : step_.rounded).shaped(screen.format, model_.hidden);
        RowNorms* norms = step_.norms.as<RowNorms>() + (own ? worker_ * step_.best_stride : 0);
        write_greedy([&, source = sampled(0)](int64_t row) {
            write_inputs(head, source(row), row, exact);
            write_inputs(screen, source(row), row, rounded);
            norms[row] = norms_of<As>(screen, row, exact, rounded);
        });

        float *most = step_.most.as<float>(), *least = step_.least.as<float>();
        multiply_greedy(screen, rounded, KeepMost{&model_.screen, norms, most, rows, {own_best(step_.best)}});

        Best* best = own_best(step_.exact_best);
        for (int64_t row = team_.claim_one(); row < rows; row = team_.claim_one()) {
            const int64_t likely = best_of(step_.best, row).index / kTileOutputs;
            take_tile<Of>(head, exact, row, likely, best[row]);
            least[row] = best[row].value;
            most[likely * rows + row] = -std::numeric_limits<float>::infinity(); // it has been
        }
        end(Phase::kHead);

        while (Range mine = team_.claim(member_, tiles)) {
            for (int64_t tile = mine.begin; tile < mine.end; tile++) {
                take_rows<Of>(head, exact, rows, tile, most + tile * rows, least, best);
            }
        }
        end(Phase::kHead);
        choose_best(step_.exact_best);
    }

    // Waits for all workers at the end of a phase.
    void end(Phase phase) {
        lead_.fetch();
        team_.barrier();
        watch_.lap(phase);
    }

    // What this worker begins the next product with is fetched from now on, if that product has few rows.
    void lead_to(const Weights& weights) {
        if (rows_.end - rows_.begin > kOwnRows) return;
        const int64_t tiles = weights.tiles();
        lead_.aim(weights.tile(team_.segment(member_, tiles)), weights.tile(team_.segment(member_ + 1, tiles)));
    }

    // Sources of the rows that a product takes.

    auto norm_of(const float* weight) const {
        return [=](int64_t row) {
            return Normalised(residual_ + row * model_.hidden, weight, model_.hidden, model_.norm_eps);
        };
    }
    auto sampled(int64_t first) const {
        return [=](int64_t row) {
            const float* x = residual_ + step_.row_at(first + row) * model_.hidden;
            return Normalised(x, model_.norm, model_.hidden, model_.norm_eps);
        };
    }

    AddFloat add_to_residual() const { return {residual_, model_.hidden}; }

    // The share's rows of a source times weights, plus a bias if there is one and what their adapters add.
    template <class Source, class Epilogue>
    void project_rows(const Weights& weights, const float* bias, const Adapters& adapters, Source source,
                      Epilogue epilogue) {
        if (!step_.work.adapted || !adapters.shrink) return multiply_rows(weights, bias, rows_, source, epilogue);
        const int64_t count = rows_.end - rows_.begin;
        const bool own = count <= kOwnRows;
        const int32_t* adapter = step_.adapter_of_row.data() + rows_.begin;
        float* low = own ? step_.own_low(worker_) : step_.low(rows_.begin);
        const Activations x = inputs_at(weights, rows_, own);
        write_rows(own, count, [&](int64_t row) {
            const auto from = source(rows_.begin + row);
            write_inputs(weights, from, row, x);
            if (adapter[row] == 0) return;
            float* wide = step_.wide_row(worker_);
            for_vectors(weights.inputs, [&](int64_t i, int n) { F32::write(wide + i, from.read(i, n), n); });
            shrink_row<T>(adapters, weights.inputs, adapter[row], wide, low + row * adapters.low);
        });
        const auto at = [=](int64_t row, int64_t column, float* sums, int outputs) {
            epilogue(rows_.begin + row, column, sums, outputs);
        };
        const AddAdapters<T, decltype(at)> adapted{&adapters, weights.tiles(), {adapter, low}, bias, at};
        linear(team_, member_, weights, x, count, adapted, kv_ahead_);
    }

    // The share's rows of `x`, likewise.
    template <class Epilogue>
    void project_stored(const Weights& weights, const float* bias, const Adapters& adapters, const Element* x,
                        Epilogue epilogue) {
        if (!step_.work.adapted || !adapters.shrink) return multiply_stored(weights, bias, rows_, x, epilogue);
        project_rows(weights, bias, adapters, [=](int64_t row) { return Plain<T>(x + row * weights.inputs); }, epilogue);
    }

    // Rows of a source times weights, plus a bias if there is one, into an epilogue.
    template <class Source, class Epilogue>
    void multiply_rows(const Weights& weights, const float* bias, Rows rows, Source source, Epilogue epilogue) {
        multiply(weights, bias, inputs_of(weights, rows, source), rows, epilogue);
    }

    // Rows of `x`, which stand one behind the other, likewise.
    template <class Epilogue>
    void multiply_stored(const Weights& weights, const float* bias, Rows rows, const Element* x, Epilogue epilogue) {
        const int64_t size = weights.inputs;
        if (weights.format == kStored && size % T::kPerWord == 0) {
            Activations stored{reinterpret_cast<const uint8_t*>(x + rows.begin * size), size * int64_t(sizeof(Element)),
                               nullptr, nullptr};
            multiply(weights, bias, stored, rows, epilogue);
        } else {
            auto source = [=](int64_t row) { return Plain<T>(x + row * size); };
            multiply_rows(weights, bias, rows, source, epilogue);
        }
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
    StepShare& share_;
    Rows rows_; // of the share; after the last attention those that are sampled
    Stopwatch watch_;
    float* residual_;
    Element* attended_;
    Element* gated_;
    Ahead kv_ahead_; // what the next attention reads
    Lead lead_;
};

// Every worker of `team` calls this.
inline void step(Step& step, Team& team, int worker) {
    with_element(step.model.heads.is_float, [&](auto type) {
        using Walk = StepWalk<decltype(type)>;
        if (step.shares_used == 1) {
            Walk(step, team, worker, step.shares[0]).layers();
        } else {
            Walk(step, *step.alone[size_t(worker)], worker, step.shares[size_t(worker)]).layers();
        }
        Walk(step, team, worker, step.shares[0]).choose();
    });
}

} // namespace headrace::HEADRACE_ISA
