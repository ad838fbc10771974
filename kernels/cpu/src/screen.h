// The greatest logit of a row, without most of the head.
//
// The head in 8 bits takes half of the arithmetic and of the memory's bandwidth, and how far its logits can be from the
// exact ones is known. With w8 for an output's weights w, and x8 for a row's inputs x:
//
//     |x w - x8 w8| = |x (w - w8) + (x - x8) w8| <= |x| |w - w8| + |x - x8| |w8|        (Cauchy and Schwarz)
//
// So a row is multiplied with the 8-bit head first, which leaves for each tile the most that one of its logits can be.
// Then the exact logits of the tile with the best estimate are computed; they rule out nearly all other tiles, and those
// left are computed exactly as well, by the micro-kernel that computes whole rows of logits. The result is not an
// approximation: it is the same token, from the same bits.
//
//     most of each tile   ···▂▁▃▂▁▁▂▅▁▂▁▁▃█▁▂▁▁▂▁▆▁···        exact: █ first, then ▆; 5 to 10 tiles of 1,536 in practice
//     the greatest so far ─────────────────────────
#pragma once

#include "linear.h"
#include "screen_types.h"

namespace headrace::HEADRACE_ISA {

// Of a row of inputs: |x| and |x - x8|.
struct RowNorms {
    float size, error;
};

// `exact` holds a row of plain elements, `rounded` the same in 8 bits.
template <class As> inline RowNorms norms_of(const Weights& screen, int64_t row, const Activations& exact,
                                             const Activations& rounded) {
    const int group = layout_of(screen.format).scale_inputs;
    const auto* x = reinterpret_cast<const typename As::Element*>(exact.values + row * exact.stride_bytes);
    const auto* x8 = reinterpret_cast<const int8_t*>(rounded.values + row * rounded.stride_bytes);
    const float* scales = rounded.scales + row * screen.groups();
    F sizes = zero(), errors = zero();
    for_vectors(screen.inputs, [&](int64_t i, int n) {
        alignas(64) float eighths[W] = {};
        for (int lane = 0; lane < n; lane++) eighths[lane] = float(x8[i + lane]);
        const F value = As::read(x + i, n), off = fma(load(eighths), set1(-scales[i / group]), value);
        sizes = fma(value, value, sizes);
        errors = fma(off, off, errors);
    });
    constexpr float kRoundedUp = 1 + 0x1p-12f;
    return {std::sqrt(reduce_add(sizes)) * kRoundedUp, std::sqrt(reduce_add(errors)) * kRoundedUp};
}

// What is kept of the 8-bit head's products: [tiles][rows] the most that a logit of the tile can be, and the best estimate
// of each row, which belongs to one worker alone.
struct KeepMost {
    const Screen* screen;
    const RowNorms* norms;
    float* most;
    int64_t rows;
    KeepBest estimates;
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int count) const {
        for (int i = count; i < kTileOutputs; i++) sums[i] = -std::numeric_limits<float>::infinity();
        const F size = set1(norms[row].size), error = set1(norms[row].error);
        F largest = set1(-std::numeric_limits<float>::infinity());
        for (int i = 0; i < kTileOutputs; i += W) {
            const F off = fma(size, load(screen->errors + column + i), mul(error, load(screen->norms + column + i)));
            largest = max(largest, add(load(sums + i), off));
        }
        most[column / kTileOutputs * rows + row] = reduce_max(largest);
        estimates(row, column, sums, count);
    }
};

// The exact logits of one tile for one row.
template <class Of>
void take_tile(Multiplier<Of>& multiplier, const Weights& head, const Activations& x, int64_t row, int64_t tile,
               Best& best) {
    alignas(64) float sums[kTileOutputs];
    const int64_t column = tile * kTileOutputs;
    multiplier(Block{&head, &x, sums, row, tile, 1, {{head.tile(tile + 1), head.groups()}}}, 1, true);
    KeepBest{&best}(0, column, sums, int(std::min<int64_t>(kTileOutputs, head.outputs - column)));
}

// Of a tile, the exact logits of all rows that may have their greatest one here: `most` [rows] is what the screen left of
// the tile, `least` [rows] a logit that each row has for certain. What isn't a number rules nothing out.
template <class Of>
void take_rows(Multiplier<Of>& multiplier, const Weights& head, const Activations& x, int64_t rows, int64_t tile,
               const float* most, const float* least, Best* best) {
    for (int64_t row = 0; row < rows; row++) {
        if (!(most[row] < least[row])) take_tile(multiplier, head, x, row, tile, best[row]);
    }
}

} // namespace headrace::HEADRACE_ISA
