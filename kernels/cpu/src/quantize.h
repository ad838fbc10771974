// Rows of activations as int8, in groups with a scale of their own: what the integer formats are multiplied with.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// One group of at most 64 floats: value = scale * int8, scale = largest / 127. `offset` becomes -128 times their sum: see
// formats.h. Past `count`, up to `group`, the bytes are zeros.
HEADRACE_INLINE void quantize_group(const float* from, int count, int group, int8_t* to, float* scale, int32_t* offset) {
    constexpr int kMostVectors = 64 / W;
    F values[kMostVectors];
    F largest = zero();
    for (int v = 0; v < group / W; v++) {
        values[v] = count >= (v + 1) * W ? load(from + v * W) : count > v * W ? load_n(from + v * W, count - v * W) : zero();
        largest = max(largest, abs(values[v]));
    }
    float peak = reduce_max(largest);
    F inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
    F sum = zero();
    for (int v = 0; v < group / W; v++) {
        F whole = round(mul(values[v], inverse));
        sum = add(sum, whole);
        store_s8(to + v * W, whole);
    }
    *scale = peak / 127.0f;
    *offset = -128 * int32_t(reduce_add(sum));
}

// A row of `count` floats; scales and offsets are one for each group.
inline void quantize_row(const float* from, int64_t count, int group, int8_t* to, float* scales, int32_t* offsets) {
    for (int64_t i = 0, g = 0; i < count; i += group, g++)
        quantize_group(from + i, int(std::min<int64_t>(group, count - i)), group, to + i, scales + g, offsets + g);
}

inline void quantize_row_bf16(const uint16_t* from, int64_t count, int group, int8_t* to, float* scales,
                              int32_t* offsets) {
    alignas(64) float values[64];
    for (int64_t i = 0, g = 0; i < count; i += group, g++) {
        int within = int(std::min<int64_t>(group, count - i));
        for (int v = 0; v < within; v += W) store(values + v, load_bf16_n(from + i + v, within - v));
        quantize_group(values, within, group, to + i, scales + g, offsets + g);
    }
}

} // namespace headrace::HEADRACE_ISA
