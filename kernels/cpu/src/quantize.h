// Rows of activations as int8, in groups with a scale of their own: what the integer formats are multiplied with.
#pragma once

#include "element.h"
#include "weights.h"

namespace headrace::HEADRACE_ISA {

// The values i..i + kGroup of a source that has `count`: value = scale * int8, scale = largest / 127. `offset` becomes
// -128 times their sum: see formats.h. Past `count` the bytes are zeros.
template <int kGroup, class Source>
HEADRACE_INLINE void quantize_group(const Source& source, int64_t i, int64_t count, int8_t* to, float* scale,
                                    int32_t* offset) {
    constexpr int kVectorsOfGroup = kGroup / W;
    F values[kVectorsOfGroup];
    if (count - i >= kGroup) {
        HEADRACE_UNROLL
        for (int v = 0; v < kVectorsOfGroup; v++) values[v] = source.read(i + v * W, W);
    } else {
        for (int v = 0; v < kVectorsOfGroup; v++) {
            const int64_t left = count - i - v * W;
            values[v] = left > 0 ? source.read(i + v * W, int(std::min<int64_t>(left, W))) : zero();
        }
    }
    F largest = zero();
    HEADRACE_UNROLL
    for (int v = 0; v < kVectorsOfGroup; v++) largest = max(largest, abs(values[v]));
    const float peak = reduce_max(largest);
    const F inverse = set1(peak > 0 ? 127.0f / peak : 0.0f);
    F sum = zero();
    HEADRACE_UNROLL
    for (int v = 0; v < kVectorsOfGroup; v++) {
        F whole = round(mul(values[v], inverse));
        sum = add(sum, whole);
        store_s8(to + v * W, whole);
    }
    *scale = peak / 127.0f;
    *offset = -128 * int32_t(reduce_add(sum));
}

// All values of a source; scales and offsets are one for each group of 32 or 64.
template <class Source>
HEADRACE_INLINE void quantize(const Source& source, int64_t count, int group, int8_t* to, float* scales, int32_t* offsets) {
    auto groups_of = [&](auto size) {
        for (int64_t i = 0; i < count; i += size) quantize_group<size>(source, i, count, to + i, scales++, offsets++);
    };
    group == 64 ? groups_of(std::integral_constant<int, 64>()) : groups_of(std::integral_constant<int, 32>());
}

inline void quantize_row(const float* from, int64_t count, int group, int8_t* to, float* scales, int32_t* offsets) {
    quantize(Plain<F32>(from), count, group, to, scales, offsets);
}

inline void quantize_row_bf16(const uint16_t* from, int64_t count, int group, int8_t* to, float* scales,
                              int32_t* offsets) {
    quantize(Plain<Bf16>(from), count, group, to, scales, offsets);
}

} // namespace headrace::HEADRACE_ISA
