// The vector layer for any machine: 4 lanes of the compiler's own vectors. The other simd_*.h have the same names.
#pragma once

#include "half.h"

namespace headrace::HEADRACE_ISA {

constexpr int W = 4;
typedef float F __attribute__((vector_size(16)));         // W floats
typedef int32_t I __attribute__((vector_size(16)));       // W 32-bit integers
typedef uint32_t Pairs __attribute__((vector_size(16)));  // W lanes of two bf16 beside each other
typedef uint32_t Bytes __attribute__((vector_size(16)));  // W lanes of four 8-bit integers

HEADRACE_INLINE F set1(float x) { return F{x, x, x, x}; }
HEADRACE_INLINE F zero() { return set1(0.0f); }
HEADRACE_INLINE F load(const float* p) {
    F a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
HEADRACE_INLINE F load_n(const float* p, int n) {
    F a = zero();
    std::memcpy(&a, p, sizeof(float) * (n < W ? n : W));
    return a;
}
HEADRACE_INLINE void store(float* p, F a) { std::memcpy(p, &a, sizeof a); }
HEADRACE_INLINE void store_n(float* p, F a, int n) { std::memcpy(p, &a, sizeof(float) * (n < W ? n : W)); }

HEADRACE_INLINE F add(F a, F b) { return a + b; }
HEADRACE_INLINE F sub(F a, F b) { return a - b; }
HEADRACE_INLINE F mul(F a, F b) { return a * b; }
HEADRACE_INLINE F div(F a, F b) { return a / b; }
HEADRACE_INLINE F fma(F a, F b, F c) { return a * b + c; } // rounded twice: not every machine has the instruction
HEADRACE_INLINE F max(F a, F b) { return a > b ? a : b; }
HEADRACE_INLINE F min(F a, F b) { return a < b ? a : b; }
HEADRACE_INLINE F abs(F a) { return same_bits<F>(same_bits<Pairs>(a) & 0x7fffffffu); }
HEADRACE_INLINE F sqrt(F a) { return F{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
HEADRACE_INLINE F round(F a) {
    return F{std::nearbyint(a[0]), std::nearbyint(a[1]), std::nearbyint(a[2]), std::nearbyint(a[3])};
}
HEADRACE_INLINE F floor(F a) { return F{std::floor(a[0]), std::floor(a[1]), std::floor(a[2]), std::floor(a[3])}; }
HEADRACE_INLINE I to_int(F a) { return __builtin_convertvector(a, I); } // of whole numbers only: it cuts
HEADRACE_INLINE F power_of_two(I n) { return same_bits<F>((n + 127) << 23); }
// p * 2^n for whole n; from 2^128 on infinity, below the smallest denormal zero. In two halves: 2^n alone may be neither.
HEADRACE_INLINE F scale_by_power(F p, F n) {
    I whole = to_int(n);
    I half = whole >> 1;
    return p * power_of_two(half) * power_of_two(whole - half);
}

HEADRACE_INLINE float reduce_add(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
HEADRACE_INLINE float reduce_max(F a) { return std::max(std::max(a[0], a[2]), std::max(a[1], a[3])); }

// The value where a is at least b, and 0 elsewhere.
HEADRACE_INLINE F where_at_least(F a, F b, F value) { return a >= b ? value : zero(); }
// A bit for each lane, the first one's the lowest, where a is at least b; none for a NaN.
HEADRACE_INLINE uint32_t lanes_at_least(F a, F b) {
    I reaches = a >= b;
    return uint32_t(reaches[0] & 1) | uint32_t(reaches[1] & 2) | uint32_t(reaches[2] & 4) | uint32_t(reaches[3] & 8);
}

HEADRACE_INLINE F load_bf16_n(const uint16_t* p, int n) {
    F a = zero();
    for (int i = 0; i < (n < W ? n : W); i++) a[i] = widen_bf16(p[i]);
    return a;
}
HEADRACE_INLINE void store_bf16_n(uint16_t* p, F a, int n) {
    for (int i = 0; i < (n < W ? n : W); i++) p[i] = narrow_bf16(a[i]);
}
HEADRACE_INLINE F load_f16_n(const uint16_t* p, int n) {
    F a = zero();
    for (int i = 0; i < (n < W ? n : W); i++) a[i] = widen_f16(p[i]);
    return a;
}
HEADRACE_INLINE void store_f16_n(uint16_t* p, F a, int n) {
    for (int i = 0; i < (n < W ? n : W); i++) p[i] = narrow_f16(a[i]);
}
HEADRACE_INLINE F load_bf16(const uint16_t* p) { return load_bf16_n(p, W); }
HEADRACE_INLINE void store_bf16(uint16_t* p, F a) { store_bf16_n(p, a, W); }
HEADRACE_INLINE F load_f16(const uint16_t* p) { return load_f16_n(p, W); }
HEADRACE_INLINE void store_f16(uint16_t* p, F a) { store_f16_n(p, a, W); }

HEADRACE_INLINE Pairs load_pairs(const uint16_t* p) {
    Pairs a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
HEADRACE_INLINE Pairs load_pairs_n(const uint16_t* p, int n) {
    Pairs a = {};
    std::memcpy(&a, p, sizeof(uint32_t) * (n < W ? n : W));
    return a;
}
HEADRACE_INLINE void store_pairs(uint16_t* p, Pairs a) { std::memcpy(p, &a, sizeof a); }
// 2W floats, of which bf16 has all bits, beside each other.
HEADRACE_INLINE Pairs pairs_of(F first, F second) {
    Pairs a = same_bits<Pairs>(first), b = same_bits<Pairs>(second);
    Pairs even = {a[0], a[2], b[0], b[2]}, odd = {a[1], a[3], b[1], b[3]};
    return (even >> 16) | (odd & 0xffff0000u);
}
HEADRACE_INLINE Pairs first_of_pairs(Pairs a) { return a & 0x0000ffffu; }
HEADRACE_INLINE Pairs broadcast_pair(const uint16_t* p) {
    uint32_t both;
    std::memcpy(&both, p, sizeof both);
    return Pairs{both, both, both, both};
}
HEADRACE_INLINE F dot_bf16(F sum, Pairs a, Pairs b) {
    sum = fma(same_bits<F>(a & 0xffff0000u), same_bits<F>(b & 0xffff0000u), sum);
    return fma(same_bits<F>(a << 16), same_bits<F>(b << 16), sum);
}

HEADRACE_INLINE I set1_int(int32_t x) { return I{x, x, x, x}; }
HEADRACE_INLINE Bytes load_bytes(const void* p) {
    Bytes a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
HEADRACE_INLINE Bytes broadcast_bytes(const void* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return Bytes{four, four, four, four};
}
// Each lane gains the products of its four unsigned bytes of `a` and signed bytes of `b`.
HEADRACE_INLINE I dot_u8s8(I sum, Bytes a, Bytes b) {
    HEADRACE_UNROLL
    for (int byte = 0; byte < 4; byte++) {
        I of_a = same_bits<I>((a >> (8 * byte)) & 0xffu);
        I of_b = same_bits<I>(b << (24 - 8 * byte)) >> 24;
        sum += of_a * of_b;
    }
    return sum;
}
HEADRACE_INLINE Bytes low_nibbles(Bytes a) { return a & 0x0f0f0f0fu; }
HEADRACE_INLINE Bytes high_nibbles(Bytes a) { return (a >> 4) & 0x0f0f0f0fu; }
HEADRACE_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
// W floats, each within -128..127 once rounded, as signed bytes.
HEADRACE_INLINE void store_s8(int8_t* p, F a) {
    a = round(a);
    for (int i = 0; i < W; i++) p[i] = int8_t(a[i]);
}
// W signed bytes as floats.
HEADRACE_INLINE F load_s8(const uint8_t* p) {
    return F{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))};
}
// W numbers of e4m3.
HEADRACE_INLINE F load_e4m3(const uint8_t* p) {
    return F{widen_e4m3(p[0]), widen_e4m3(p[1]), widen_e4m3(p[2]), widen_e4m3(p[3])};
}

} // namespace headrace::HEADRACE_ISA
