// What becomes of a product's sums: `linear` hands each row's 32 of a tile to one of these while they are in the cache.
//
// epilogue(row, column, sums, count): `sums` may be overwritten; those past `count` belong to no output.
#pragma once

#include "exponential.h"
#include "linear_job.h"

namespace headrace::HEADRACE_ISA {

struct StoreFloat {
    float* to;
    int64_t stride;
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int count) const {
        float* out = to + row * stride + column;
        int i = 0;
        for (; i + W <= count; i += W) store(out + i, load(sums + i));
        if (i < count) store_n(out + i, load(sums + i), count - i);
    }
};

struct StoreBf16 {
    uint16_t* to;
    int64_t stride;
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int count) const {
        uint16_t* out = to + row * stride + column;
        int i = 0;
        for (; i + W <= count; i += W) store_bf16(out + i, load(sums + i));
        if (i < count) store_bf16_n(out + i, load(sums + i), count - i);
    }
};

// Adds into rows of floats: the residual stream.
struct AddFloat {
    float* to;
    int64_t stride;
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int count) const {
        float* out = to + row * stride + column;
        int i = 0;
        for (; i + W <= count; i += W) store(out + i, add(load(out + i), load(sums + i)));
        if (i < count) store_n(out + i, add(load_n(out + i, count - i), load(sums + i)), count - i);
    }
};

// silu(gate) * up, where each tile holds 16 rows of the gate and then the same 16 rows of up. The result is bf16 or float.
template <class Out> struct SiluMultiply {
    Out* to;
    int64_t stride;
    int64_t columns; // of the result
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int) const {
        constexpr int kHalf = kTileOutputs / 2;
        column /= 2;
        Out* out = to + row * stride + column;
        int count = int(std::min<int64_t>(kHalf, columns - column));
        for (int i = 0; i < count; i += W) {
            F gated = mul(silu(load(sums + i)), load(sums + kHalf + i));
            if constexpr (sizeof(Out) == sizeof(float)) {
                store_n(out + i, gated, count - i);
            } else {
                store_bf16_n(out + i, gated, count - i);
            }
        }
    }
};

// Keeps the best output of each row; `best` belongs to one worker alone, the caller merges the workers' afterwards.
struct KeepBest {
    Best* best;
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int count) const {
        for (int i = count; i < kTileOutputs; i++) sums[i] = -std::numeric_limits<float>::infinity();
        F largest = load(sums);
        for (int i = W; i < kTileOutputs; i += W) largest = max(largest, load(sums + i));
        float value = reduce_max(largest);
        if (value < best[row].value) return;
        for (int i = 0; i < count; i++)
            if (sums[i] == value) return best[row].take(value, int32_t(column + i));
    }
};

// Adds a bias of floats to each row, then does what `Next` does.
template <class Next> struct AddBias {
    const float* bias;
    Next next;
    HEADRACE_INLINE void operator()(int64_t row, int64_t column, float* sums, int count) const {
        for (int i = 0; i < count; i += W) store(sums + i, add(load(sums + i), load_n(bias + column + i, count - i)));
        next(row, column, sums, count);
    }
};

} // namespace headrace::HEADRACE_ISA
