// From a step's last residuals to the tokens that are chosen.
#pragma once

#include "norm.h"
#include "sampling.h"
#include "screen.h"
#include "step_worker.h"

namespace headrace::HEADRACE_ISA {

class Head : StepWorker {
    // What the head reads of samples, from some place on.
    auto sampled(int64_t first) const {
        return [=](int64_t row) {
            const float* x = residual_ + step_.row_at(first + row) * model_.hidden;
            return Normalised(x, model_.norm, model_.hidden, model_.norm_eps);
        };
    }

  public:
    Head(Step& step, Team& team, int worker) : StepWorker(step, team, worker, step.shares[0]) {}

    // The rows that only need their greatest logit never see the others' logits, nor do these see theirs.
    void choose() {
        const StepWork& work = step_.work;
        if (work.greedy == 0) {
            if (step_.shares_used > 1) team_.barrier();
        } else {
            const bool has_screen = model_.screen.weights.bytes != nullptr;
            if (has_screen && model_.head.format == Format::kF32) {
                choose_screened<F32, FormatF32>();
            } else if (has_screen && work.greedy <= Multiplier<FormatBf16>::kMostScreened) {
                choose_screened<Bf16, FormatBf16>();
            } else {
                choose_greedy();
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
        for (int64_t row = 0; row < step_.work.greedy; row++) {
            const Best best = best_of(found, row);
            step_.tokens[step_.sample_at(row)] = std::isfinite(best.value) ? best.index : kNoToken;
        }
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

    // The greedy rows times the head or its screen. Each worker claims those of its own share first.
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

        Multiplier<Of> multiplier;
        Best* best = own_best(step_.exact_best);
        for (int64_t row = team_.claim_one(); row < rows; row = team_.claim_one()) {
            const int64_t likely = best_of(step_.best, row).index / kTileOutputs;
            take_tile(multiplier, head, exact, row, likely, best[row]);
            least[row] = best[row].value;
            most[likely * rows + row] = -std::numeric_limits<float>::infinity(); // it has been
        }
        end(Phase::kHead);

        while (Range mine = team_.claim(member_, tiles)) {
            for (int64_t tile = mine.begin; tile < mine.end; tile++) {
                take_rows(multiplier, head, exact, rows, tile, most + tile * rows, least, best);
            }
        }
        end(Phase::kHead);
        choose_best(step_.exact_best);
    }
};

} // namespace headrace::HEADRACE_ISA
