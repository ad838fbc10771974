// From rows of weights as files have them to the tiles of weights.h, and back for a single row.
#pragma once

#include "team.h"
#include "weights.h"

namespace headrace {

// What a row is made of. The quantised ones are GGUF's blocks: 32 weights in Q8_0, Q4_0 and Q4_1, 256 in Q4_K.
enum class Source : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2, kQ8_0 = 3, kQ4_0 = 4, kQ4_1 = 5, kQ4_K = 6 };

struct Row {
    const void* at; // null: a row of zeros
    Source source;
    int32_t reserved;
};

// Packs the rows of `to`, whose `bytes` are not looked at, into `bytes`. Rows are given one by one, so that a caller can
// concatenate matrices or interleave gate with up. Blocks of 4 bits keep their numbers in kU4G32, and Q8_0 in kInt8G32;
// every other pair of source and format goes through floats.
void pack(Team& team, const Weights& to, const Row* rows, uint8_t* bytes);

// Row `output` of packed weights as floats: a tied embedding is read from the head.
void unpack_row(const Weights& weights, int64_t output, float* to);

} // namespace headrace
