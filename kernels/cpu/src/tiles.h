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

// Calls body(first, N) for tiles of kTileVectors, then halves of that, until `count` vectors are done.
template <int N = kTileVectors, class Body> HEADRACE_INLINE void for_tiles(int64_t count, Body body, int64_t first = 0) {
    for (; first + N <= count; first += N) body(first, std::integral_constant<int, N>());
    if constexpr (N > 1) for_tiles<N / 2>(count, body, first);
}

// Calls body(first, R) for tiles of at most kTileRows, as equal as they can be.
template <class Body> HEADRACE_INLINE void for_row_tiles(int64_t rows, Body body) {
    int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = rows * tile / tiles;
        as_constant<kTileRows>(int(rows * (tile + 1) / tiles - first), [&](auto count) { body(first, count); });
    }
}

} // namespace headrace::HEADRACE_ISA
