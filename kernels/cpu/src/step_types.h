// A whole model as data: what `step.h` walks through. Plain structs that ctypes fills; all memory is the caller's.
#pragma once

#include "attention_types.h"
#include "lora_types.h"
#include "sampling_types.h"
#include "screen_types.h"
#include "weights.h"

namespace headrace {

// Null pointers mean that the model has no such thing. Norms and biases are float; the bias of gate_up lies as its rows
// do, in tiles of 16 of the gate and 16 of up.
struct StepLayer {
    Weights qkv, output, gate_up, down;
    const float* attention_norm;
    const float* mlp_norm;
    const float* q_norm;
    const float* k_norm;
    const float* qkv_bias;
    const float* output_bias;
    const float* gate_up_bias;
    const float* down_bias;
    Adapters qkv_adapters, output_adapters, gate_up_adapters, down_adapters;
};

struct StepModel {
    HeadShape heads;
    int32_t layers;
    int64_t hidden;
    int64_t inner;
    Weights embedding;
    Weights head; // the embedding's again if the two are tied, cut to the ids that may be sampled
    Screen screen;
    const float* norm;
    const float* cos_sin; // [positions, 2, head_size / 2]
    float norm_eps;
    float scale; // of the attention's scores
    // Where pages lie in the arena: kernels.kv.KVLayout.
    int64_t pages_per_extent;
    int64_t extent_bytes;
    int64_t page_bytes;
    int64_t layer_bytes;

    int64_t page_offset(int64_t page) const {
        return page / pages_per_extent * extent_bytes + page % pages_per_extent * page_bytes;
    }
};

// The rows behind the greedy ones, and where their results go; `top_ids` and `top_logprobs` are [rows][most_top].
struct StepSampling {
    const SamplingRow* rows;
    SampledRow* chosen;
    int32_t* top_ids;
    double* top_logprobs;
    int64_t most_top;
};

// The phases of a step, as `Step::seconds` counts them.
enum class Phase : int32_t { kEmbed, kNorm, kQkv, kRotary, kAttention, kOutput, kGateUp, kDown, kHead, kSample };
constexpr int kPhases = 10;

} // namespace headrace
