// The vector layer for AVX2 with FMA and F16C: 8 lanes. The other simd_*.h have the same names.
#pragma once

namespace headrace::HEADRACE_ISA {

constexpr int W = 8;
using F = __m256;      // W floats
using I = __m256i;     // W 32-bit integers
using Pairs = __m256i; // W lanes of two bf16 beside each other
using Bytes = __m256i; // W lanes of four 8-bit integers

HEADRACE_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

HEADRACE_INLINE F zero() { return _mm256_setzero_ps(); }
HEADRACE_INLINE F set1(float x) { return _mm256_set1_ps(x); }
HEADRACE_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
HEADRACE_INLINE F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
HEADRACE_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a); }
HEADRACE_INLINE void store_n(float* p, F a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a); }

HEADRACE_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
HEADRACE_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
HEADRACE_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
HEADRACE_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
HEADRACE_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
HEADRACE_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
HEADRACE_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
HEADRACE_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
HEADRACE_INLINE F sqrt(F a) { return _mm256_sqrt_ps(a); }
HEADRACE_INLINE F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE F floor(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE F power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// p * 2^n for whole n; from 2^128 on infinity, below the smallest denormal zero. In two halves: 2^n alone may be neither.
HEADRACE_INLINE F scale_by_power(F p, F n) {
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    return mul(mul(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

HEADRACE_INLINE float reduce_add(F a) {
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
HEADRACE_INLINE float reduce_max(F a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// The value where a is at least b, and 0 elsewhere.
HEADRACE_INLINE F where_at_least(F a, F b, F value) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), value); }
// A bit for each lane, the first one's the lowest, where a is at least b; none for a NaN.
HEADRACE_INLINE uint32_t lanes_at_least(F a, F b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
}

HEADRACE_INLINE __m128i load_halves(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
HEADRACE_INLINE __m128i load_halves_n(const uint16_t* p, int n) {
    alignas(16) uint16_t lanes[W] = {};
    std::memcpy(lanes, p, sizeof(uint16_t) * (n < W ? n : W));
    return load_halves(lanes);
}
HEADRACE_INLINE void store_halves(uint16_t* p, __m128i a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }
HEADRACE_INLINE void store_halves_n(uint16_t* p, __m128i a, int n) {
    alignas(16) uint16_t lanes[W];
    store_halves(lanes, a);
    std::memcpy(p, lanes, sizeof(uint16_t) * (n < W ? n : W));
}

HEADRACE_INLINE F widen_bf16(__m128i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
// Round to nearest even; a NaN stays one.
HEADRACE_INLINE __m128i narrow_bf16(F a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
HEADRACE_INLINE F load_bf16(const uint16_t* p) { return widen_bf16(load_halves(p)); }
HEADRACE_INLINE F load_bf16_n(const uint16_t* p, int n) { return widen_bf16(load_halves_n(p, n)); }
HEADRACE_INLINE void store_bf16(uint16_t* p, F a) { store_halves(p, narrow_bf16(a)); }
HEADRACE_INLINE void store_bf16_n(uint16_t* p, F a, int n) { store_halves_n(p, narrow_bf16(a), n); }
HEADRACE_INLINE F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }
HEADRACE_INLINE F load_f16_n(const uint16_t* p, int n) { return _mm256_cvtph_ps(load_halves_n(p, n)); }
HEADRACE_INLINE void store_f16(uint16_t* p, F a) { store_halves(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
HEADRACE_INLINE void store_f16_n(uint16_t* p, F a, int n) {
    store_halves_n(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), n);
}

HEADRACE_INLINE Pairs load_pairs(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
HEADRACE_INLINE Pairs load_pairs_n(const uint16_t* p, int n) {
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first_lanes(n));
}
HEADRACE_INLINE void store_pairs(uint16_t* p, Pairs a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
// 2W floats, of which bf16 has all bits, beside each other.
HEADRACE_INLINE Pairs pairs_of(F first, F second) {
    __m256i a = _mm256_srli_epi32(_mm256_castps_si256(first), 16), b = _mm256_srli_epi32(_mm256_castps_si256(second), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0b11011000); // packing interleaves the two halves
}
HEADRACE_INLINE Pairs first_of_pairs(Pairs a) { return _mm256_and_si256(a, _mm256_set1_epi32(0x0000ffff)); }
HEADRACE_INLINE Pairs broadcast_pair(const uint16_t* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm256_set1_epi32(both);
}
HEADRACE_INLINE F dot_bf16(F sum, Pairs a, Pairs b) {
    const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
    sum = fma(_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper)), sum);
    return fma(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
}

HEADRACE_INLINE I set1_int(int32_t x) { return _mm256_set1_epi32(x); }
HEADRACE_INLINE Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
HEADRACE_INLINE Bytes broadcast_bytes(const void* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}
// Each lane gains the products of its four unsigned bytes of `a` and signed bytes of `b`, exactly: vpmaddubsw would
// saturate, so even and odd bytes are widened to 16 bits first.
HEADRACE_INLINE I dot_u8s8(I sum, Bytes a, Bytes b) {
    __m256i even_a = _mm256_and_si256(a, _mm256_set1_epi16(0x00ff)), odd_a = _mm256_srli_epi16(a, 8);
    __m256i even_b = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), odd_b = _mm256_srai_epi16(b, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even_a, even_b));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd_a, odd_b));
}
HEADRACE_INLINE Bytes low_nibbles(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(0x0f)); }
HEADRACE_INLINE Bytes high_nibbles(Bytes a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
HEADRACE_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
// W floats, each within -128..127 once rounded, as signed bytes.
HEADRACE_INLINE void store_s8(int8_t* p, F a) {
    __m256i whole = _mm256_cvtps_epi32(a);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
// W signed bytes as floats.
HEADRACE_INLINE F load_s8(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
// W numbers of e4m3. A half has their mantissa, and an exponent of a bit more that is off by 8; denormals included.
HEADRACE_INLINE F load_e4m3(const void* p) {
    __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p))), 7);
    __m128i halves = _mm_and_si128(words, _mm_set1_epi16(int16_t(0xbfff))); // the sign stood in both upper bits
    return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
}

} // namespace headrace::HEADRACE_ISA
