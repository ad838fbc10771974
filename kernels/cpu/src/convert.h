// Rows of numbers from one type to another.
#pragma once

#include "exponential.h"

namespace headrace::HEADRACE_ISA {

inline void float_to_bf16(const float* from, uint16_t* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store_bf16(to + i, load(from + i));
    if (i < count) store_bf16_n(to + i, load_n(from + i, int(count - i)), int(count - i));
}

inline void bf16_to_float(const uint16_t* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load_bf16(from + i));
    if (i < count) store_n(to + i, load_bf16_n(from + i, int(count - i)), int(count - i));
}

inline void float_to_f16(const float* from, uint16_t* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store_f16(to + i, load(from + i));
    if (i < count) store_f16_n(to + i, load_n(from + i, int(count - i)), int(count - i));
}

inline void f16_to_float(const uint16_t* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load_f16(from + i));
    if (i < count) store_n(to + i, load_f16_n(from + i, int(count - i)), int(count - i));
}

inline void exponential(const float* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, exp(load(from + i)));
    if (i < count) store_n(to + i, exp(load_n(from + i, int(count - i))), int(count - i));
}

} // namespace headrace::HEADRACE_ISA
