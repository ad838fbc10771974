// How attention cuts rows and vectors into tiles, and hides what lies at their edges.
#pragma once

#include "element.h"

namespace headrace::HEADRACE_ISA {

// A tile's sums stay in registers: rows times vectors, beside the vectors that are multiplied.
constexpr int kTileRows = W == 16 ? 6 : 4;
constexpr int kTileVectors = W == 16 ? 4 : 2;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// W times +inf, W times -inf, W times +inf: the least of a score and a part of this hides the lanes before or behind an
// edge.
struct Edges {
    float values[3 * W];
    constexpr Edges() : values() {
        for (int i = 0; i < 3 * W; i++) values[i] = i / W == 1 ? -kInfinity : kInfinity;
    }
};
constexpr Edges kEdges;

// Calls body(N) with N = count as a constant, 1..Most.
template <int Most, class Body> HEADRACE_INLINE void as_constant(int count, Body body) {
    if constexpr (Most > 1) {
        if (count < Most) return as_constant<Most - 1>(count, body);
    }
    body(std::integral_constant<int, Most>());
}

// Calls body(first, N) for tiles of at most Most, as equal as they can be: a narrow one at the end would have too few sums
// to hide what a product takes.
template <int Most, class Body> HEADRACE_INLINE void for_tiles(int64_t count, Body body) {
    const int64_t tiles = (count + Most - 1) / Most;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = count * tile / tiles;
        as_constant<Most>(int(count * (tile + 1) / tiles - first), [&](auto size) { body(first, size); });
    }
}

// Vectors beside so many rows.
constexpr int tile_vectors(int rows) { return W == 16 && rows <= 3 ? kTileVectors + 1 : kTileVectors; }

// Calls body(first, R) for tiles of rows.
template <class Body> HEADRACE_INLINE void for_row_tiles(int64_t rows, Body body) { for_tiles<kTileRows>(rows, body); }

} // namespace headrace::HEADRACE_ISA
