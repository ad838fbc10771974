// From a step's tokens to its last residuals: the embedding and all layers.
#pragma once

#include "attention.h"
#include "lora.h"
#include "norm.h"
#include "pack.h"
#include "rotary.h"
#include "step_worker.h"

namespace headrace::HEADRACE_ISA {

// T: what queries, keys, values and the activations between products are stored as.
template <class T> class Layers : StepWorker {
    using Element = typename T::Element;
    static constexpr Format kStored = std::is_same_v<T, F32> ? Format::kF32 : Format::kBf16;

  public:
    Layers(Step& step, Team& team, int worker, StepShare& share)
        : StepWorker(step, team, worker, share), share_(share), rows_{share.begin, share.end},
          attended_(step.attended.as<Element>()), gated_(step.gated.as<Element>()) {}

    void compute() {
        kv_ahead_.start(step_.kv);
        embed();
        for (int64_t i = 0; i < model_.layers; i++) {
            attention(step_.layers[size_t(i)], i);
            mlp(step_.layers[size_t(i)], i);
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
        kv_ahead_.stop();
        end(Phase::kAttention);

        if (index + 1 == model_.layers) keep_sampled(queries);
        project_stored(layer.output, layer.output_bias, layer.output_adapters, attended_, add_to_residual());
        lead_to(layer.gate_up);
        end(Phase::kOutput);
    }

    void mlp(const StepLayer& layer, int64_t index) {
        project_rows(layer.gate_up, layer.gate_up_bias, layer.gate_up_adapters, norm_of(layer.mlp_norm),
                     SiluMultiply<Element>{gated_, model_.inner, model_.inner});
        lead_to(layer.down);
        end(Phase::kGateUp);
        if (index + 1 < model_.layers) kv_ahead_.start(step_.kv + (index + 1) * model_.layer_bytes);
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

    // What this worker begins the next product with is fetched from now on, if that product has few rows.
    void lead_to(const Weights& weights) {
        if (rows_.end - rows_.begin > kOwnRows) return;
        const int64_t tiles = weights.tiles();
        lead_.aim(weights.tile(team_.segment(member_, tiles)), weights.tile(team_.segment(member_ + 1, tiles)));
    }

    auto norm_of(const float* weight) const {
        return [=](int64_t row) {
            return Normalised(residual_ + row * model_.hidden, weight, model_.hidden, model_.norm_eps);
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

    StepShare& share_;
    Rows rows_; // of the share; after the last attention those that are sampled
    Element* attended_;
    Element* gated_;
};

} // namespace headrace::HEADRACE_ISA
