// Low-rank adapters: what is added to a product's outputs, for each row by its own adapter or by none.
//
// A row is shrunk when the inputs of the product are written, and expanded in the product's epilogue, while its sums are in
// the cache: so nobody waits more often, and a row without an adapter keeps every bit. What a row gets depends on
// nothing but itself and its adapter.
#pragma once

#include "element.h"
#include "epilogues.h"
#include "lora_types.h"

namespace headrace::HEADRACE_ISA {

// x [inputs] times the matrix of an adapter, counted from 1, to [low] floats.
template <class T>
inline void shrink_row(const Adapters& adapters, int64_t inputs, int32_t adapter, const float* x, float* out) {
    const auto* rows = static_cast<const typename T::Element*>(adapters.shrink) + (adapter - 1) * adapters.low * inputs;
    for (int64_t first = 0; first < adapters.low; first += kShrunk, rows += kShrunk * inputs) {
        F sums[kShrunk];
        HEADRACE_UNROLL
        for (int s = 0; s < kShrunk; s++) sums[s] = zero();
        for_vectors(inputs, [&](int64_t i, int n) {
            const F a = F32::read(x + i, n);
            HEADRACE_UNROLL
            for (int s = 0; s < kShrunk; s++) sums[s] = fma(T::read(rows + s * inputs + i, n), a, sums[s]);
        });
        for (int s = 0; s < kShrunk; s++) out[first + s] = reduce_add(sums[s]);
    }
}

// Adds to the sums of a tile what an adapter, counted from 1, makes of a shrunk row [low].
template <class T>
inline void expand_tile(const Adapters& adapters, int64_t tiles, int32_t adapter, int64_t tile, const float* low,
                        float* sums) {
    constexpr int kParts = kTileOutputs / W;
    const int64_t place = (adapter - 1) * tiles + tile;
    const auto* weights = static_cast<const typename T::Element*>(adapters.expand) + place * adapters.low * kTileOutputs;
    F even[kParts], odd[kParts];
    HEADRACE_UNROLL
    for (int v = 0; v < kParts; v++) {
        even[v] = load(sums + v * W);
        odd[v] = zero();
    }
    for (int32_t i = adapters.spans[2 * tile]; i < adapters.spans[2 * tile + 1]; i += 2) {
        const auto* row = weights + i * kTileOutputs;
        const F first = set1(low[i]), second = set1(low[i + 1]);
        HEADRACE_UNROLL
        for (int v = 0; v < kParts; v++) {
            even[v] = fma(T::read(row + v * W, W), first, even[v]);
            odd[v] = fma(T::read(row + kTileOutputs + v * W, W), second, odd[v]);
        }
    }
    HEADRACE_UNROLL
    for (int v = 0; v < kParts; v++) store(sums + v * W, add(even[v], odd[v]));
}

// Rows of a product whose adapters are known, and what they were shrunk to.
struct ShrunkRows {
    const int32_t* adapter; // [rows] counted from 1, 0 for none
    const float* low;       // [rows][low]
};

// Adds a bias of floats, if there is one, and what each row's adapter makes of it; then does what `Next` does.
template <class T, class Next> struct AddAdapters {
    const Adapters* adapters;
    int64_t tiles;
    ShrunkRows rows;
    const float* bias;
    Next next;
    void operator()(int64_t row, int64_t column, float* sums, int count) const {
        if (bias) {
            for (int i = 0; i < count; i += W) store(sums + i, add(load(sums + i), load_n(bias + column + i, count - i)));
        }
        if (const int32_t adapter = rows.adapter[row]) {
            expand_tile<T>(*adapters, tiles, adapter, column / kTileOutputs, rows.low + row * adapters->low, sums);
        }
        next(row, column, sums, count);
    }
};

// The operation alone: adds to rows `begin` to `end` of out [rows][outputs] what their adapters make of x [rows][inputs],
// both of float or bf16 as the adapters are. `scratch` holds inputs + low floats.
inline void add_adapters(const Adapters& adapters, const int32_t* adapter, const void* x, int64_t inputs, void* out,
                         int64_t outputs, int64_t begin, int64_t end, float* scratch, bool is_float) {
    with_element(is_float, [&](auto type) {
        using T = decltype(type);
        const int64_t tiles = (outputs + kTileOutputs - 1) / kTileOutputs;
        float* low = scratch + inputs;
        for (int64_t row = begin; row < end; row++) {
            if (adapter[row] == 0) continue;
            const auto* from = static_cast<const typename T::Element*>(x) + row * inputs;
            auto* to = static_cast<typename T::Element*>(out) + row * outputs;
            for_vectors(inputs, [&](int64_t i, int n) { F32::write(scratch + i, T::read(from + i, n), n); });
            shrink_row<T>(adapters, inputs, adapter[row], scratch, low);
            for (int64_t tile = 0; tile < tiles; tile++) {
                alignas(64) float sums[kTileOutputs] = {};
                const int64_t column = tile * kTileOutputs;
                const int64_t count = std::min<int64_t>(kTileOutputs, outputs - column);
                for_vectors(count, [&](int64_t i, int n) { F32::write(sums + i, T::read(to + column + i, n), n); });
                expand_tile<T>(adapters, tiles, adapter[row], tile, low, sums);
                for_vectors(count, [&](int64_t i, int n) { T::write(to + column + i, F32::read(sums + i, n), n); });
            }
        }
    });
}

} // namespace headrace::HEADRACE_ISA
