// The vector layer for AVX-512 with BF16 and VNNI: 16 lanes. The other simd_*.h have the same names.
#pragma once

namespace headrace::HEADRACE_ISA {

constexpr int W = 16;
using F = __m512;      // W floats
using I = __m512i;     // W 32-bit integers
using Pairs = __m512i; // W lanes of two bf16 beside each other
using Bytes = __m512i; // W lanes of four 8-bit integers

HEADRACE_INLINE __mmask16 first_lanes(int n) { return n >= W ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }

HEADRACE_INLINE F zero() { return _mm512_setzero_ps(); }
HEADRACE_INLINE F set1(float x) { return _mm512_set1_ps(x); }
HEADRACE_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
HEADRACE_INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
HEADRACE_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
HEADRACE_INLINE void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }

HEADRACE_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
HEADRACE_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
HEADRACE_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
HEADRACE_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
HEADRACE_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
HEADRACE_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
HEADRACE_INLINE F abs(F a) { return _mm512_abs_ps(a); }
HEADRACE_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
HEADRACE_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE F floor(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// p * 2^n for whole n; from 2^128 on infinity, below the smallest denormal zero.
HEADRACE_INLINE F scale_by_power(F p, F n) { return _mm512_scalef_ps(p, n); }

HEADRACE_INLINE float reduce_add(F a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
HEADRACE_INLINE float reduce_max(F a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// The value where a is at least b, and 0 elsewhere.
HEADRACE_INLINE F where_at_least(F a, F b, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), value);
}
// A bit for each lane, the first one's the lowest, where a is at least b; none for a NaN.
HEADRACE_INLINE uint32_t lanes_at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }

HEADRACE_INLINE F widen_bf16(__m256i a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
HEADRACE_INLINE F load_bf16(const uint16_t* p) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HEADRACE_INLINE F load_bf16_n(const uint16_t* p, int n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
HEADRACE_INLINE __m256i narrow_bf16(F a) {
    __m256bh b = _mm512_cvtneps_pbh(a);
    __m256i c;
    std::memcpy(&c, &b, sizeof c);
    return c;
}
HEADRACE_INLINE void store_bf16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
HEADRACE_INLINE void store_bf16_n(uint16_t* p, F a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}
HEADRACE_INLINE F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HEADRACE_INLINE F load_f16_n(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
HEADRACE_INLINE void store_f16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
HEADRACE_INLINE void store_f16_n(uint16_t* p, F a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

HEADRACE_INLINE Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
HEADRACE_INLINE Pairs load_pairs_n(const uint16_t* p, int n) { return _mm512_maskz_loadu_epi32(first_lanes(n), p); }
HEADRACE_INLINE void store_pairs(uint16_t* p, Pairs a) { _mm512_storeu_si512(p, a); }
// 2W floats, of which bf16 has all bits, beside each other.
HEADRACE_INLINE Pairs pairs_of(F first, F second) {
    return reinterpret_cast<Pairs>(_mm512_cvtne2ps_pbh(second, first));
}
HEADRACE_INLINE Pairs first_of_pairs(Pairs a) { return _mm512_and_si512(a, _mm512_set1_epi32(0x0000ffff)); }
HEADRACE_INLINE Pairs broadcast_pair(const uint16_t* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm512_set1_epi32(both);
}
HEADRACE_INLINE F dot_bf16(F sum, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

HEADRACE_INLINE I set1_int(int32_t x) { return _mm512_set1_epi32(x); }
HEADRACE_INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
HEADRACE_INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
HEADRACE_INLINE Bytes broadcast_bytes(const void* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
// Each lane gains the products of its four unsigned bytes of `a` and signed bytes of `b`, exactly.
HEADRACE_INLINE I dot_u8s8(I sum, Bytes a, Bytes b) {
    // Not the intrinsic: GCC copies its accumulator from one register to another and back in every step.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
HEADRACE_INLINE Bytes low_nibbles(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
HEADRACE_INLINE Bytes high_nibbles(Bytes a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
HEADRACE_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
// W floats, each within -128..127 once rounded, as signed bytes.
HEADRACE_INLINE void store_s8(int8_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
// W signed bytes as floats.
HEADRACE_INLINE F load_s8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// W numbers of e4m3. A half has their mantissa, and an exponent of a bit more that is off by 8; denormals included.
HEADRACE_INLINE F load_e4m3(const void* p) {
    __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))), 7);
    __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(int16_t(0xbfff))); // the sign stood in both upper bits
    return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
}

} // namespace headrace::HEADRACE_ISA
