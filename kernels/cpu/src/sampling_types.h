// What sampling takes for one row and gives back: plain structs that Python fills as columns of an array.
#pragma once

#include "base.h"

namespace headrace {

// kernels.sampling.SamplingBatch, one row of it. Pointers may be null where their count is 0.
struct SamplingRow {
    double temperature;
    double top_p;
    double min_p;
    uint64_t seed;
    int64_t position;
    int32_t top_k;        // 0 or less keeps all
    int32_t forced;       // the token if the row is scored and not sampled, else -1
    int32_t top_logprobs; // likeliest tokens to report beside the chosen one; -1 reports nothing
    int32_t prompt_count; // of `tokens`
    const int32_t* tokens; // all known ones, the prompt first
    const int32_t* bias_ids;
    const float* bias;
    const int32_t* banned;
    const uint8_t* allowed; // a bit for each id, the lowest of a byte first; null allows all
    int64_t token_count;
    int64_t bias_count;
    int64_t banned_count;
    float repetition;
    float frequency;
    float presence;
    int32_t reserved;

    bool is_greedy() const { return temperature < 1e-5 || top_k == 1 || top_p <= 0 || min_p >= 1; }
    bool has_penalty() const { return token_count > 0 && (repetition != 1 || frequency != 0 || presence != 0); }
    bool changes_logits() const { return has_penalty() || bias_count > 0 || banned_count > 0 || allowed; }
};

// Stands for the token of a row whose greatest logit is no finite number: kernels.sampling.NO_TOKEN.
constexpr int32_t kNoToken = -1;

struct SampledRow {
    int32_t token;
    int32_t rank; // 1 for the likeliest
    double logprob;
};

// An id with its place in an order: the greatest value first, equal ones by id.
struct Candidate {
    float value;
    int32_t id;
    bool operator<(const Candidate& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

// Sorts the first `wanted` of `count` candidates to the front; returns how many that are.
int64_t sort_first(Candidate* candidates, int64_t count, int64_t wanted);
// The value that `rank` - 1 of the `count` values precede in descending order; reorders them. None may be a NaN.
float greatest_of_rank(float* values, int64_t count, int64_t rank);

constexpr int64_t kGroup = 64;
constexpr int64_t padded(int64_t vocab) { return (vocab + kGroup - 1) / kGroup * kGroup; }

// One worker's memory, kept from step to step. All zero at first.
struct SamplingScratch {
    float* logits;         // [vocab] of a row whose logits are changed
    float* scaled;         // [vocab]
    int32_t* times;        // [vocab] 0 between two rows
    Candidate* candidates; // [vocab]
    float* maxima;         // [groups]
    float* ranked;         // [groups]
    double* sums;          // [groups]
    double* mass;          // [vocab]

    static constexpr int64_t bytes(int64_t vocab) {
        int64_t size = padded(vocab);
        return size * int64_t(2 * sizeof(float) + sizeof(int32_t) + sizeof(Candidate) + sizeof(double)) +
               size / kGroup * int64_t(2 * sizeof(float) + sizeof(double));
    }
    SamplingScratch(void* memory, int64_t vocab) {
        int64_t size = padded(vocab), groups = size / kGroup;
        sums = static_cast<double*>(memory);
        mass = sums + groups;
        candidates = reinterpret_cast<Candidate*>(mass + size);
        logits = reinterpret_cast<float*>(candidates + size);
        scaled = logits + size;
        maxima = scaled + size;
        ranked = maxima + groups;
        times = reinterpret_cast<int32_t*>(ranked + groups);
    }
};

// A number in [0, 1), a pure function of its arguments: kernels.sampling.uniform.
inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
inline double uniform(uint64_t seed, int64_t position) {
    return double(mix(mix(seed) + uint64_t(position + 1) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
}

} // namespace headrace
