// Low-rank adapters of a product as data; all memory is the caller's.
#pragma once

#include "weights.h"

namespace headrace {

// A row is shrunk to so many numbers at a time.
constexpr int kShrunk = 8;

// What adapters add to the outputs of packed weights: expand * (shrink * x), with floats or bf16. Where several matrices
// are joined, the numbers that a row is shrunk to for each of them stand one behind the other.
struct Adapters {
    const void* shrink;   // [adapters][low][inputs]; null: no adapter changes these weights
    const void* expand;   // [adapters][tiles][low][32], the outputs in the order of the packed ones
    const int32_t* spans; // [tiles][2] of the shrunk numbers those that a tile's outputs take: first and end, both even
    int64_t low;          // a multiple of kShrunk
};

} // namespace headrace
