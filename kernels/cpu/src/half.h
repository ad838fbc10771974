// One number at a time between float, bf16, half precision and e4m3, on any machine.
#pragma once

#include "base.h"

namespace headrace {

template <class To, class From> HEADRACE_INLINE To same_bits(From a) {
    static_assert(sizeof(To) == sizeof(From));
    To b;
    std::memcpy(&b, &a, sizeof b);
    return b;
}

HEADRACE_INLINE float widen_bf16(uint16_t a) { return same_bits<float>(uint32_t(a) << 16); }
// Round to nearest even; a NaN stays one.
HEADRACE_INLINE uint16_t narrow_bf16(float a) {
    uint32_t bits = same_bits<uint32_t>(a);
    if (a != a) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Half precision through integers: 2^112 moves its exponent to where a float has it, denormals included.
HEADRACE_INLINE float widen_f16(uint16_t a) {
    uint32_t sign = uint32_t(a & 0x8000) << 16, magnitude = uint32_t(a & 0x7fff) << 13;
    if (magnitude >= 0x0f800000u) return same_bits<float>(sign | 0x70000000u | magnitude);
    return same_bits<float>(sign | same_bits<uint32_t>(same_bits<float>(magnitude) * 0x1p112f));
}
HEADRACE_INLINE uint16_t narrow_f16(float a) {
    uint32_t sign = (same_bits<uint32_t>(a) >> 16) & 0x8000, magnitude = same_bits<uint32_t>(a) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00); // rounds to 65536 or more
    if (magnitude < 0x38800000u)                                  // a denormal: the adder rounds it in steps of 2^-24
        return uint16_t(sign | (same_bits<uint32_t>(same_bits<float>(magnitude) + 0.5f) - 0x3f000000u));
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

// e4m3: four bits of exponent, three of mantissa, and no infinities. Under 2^-6 it stands in steps of 2^-9; 448 is the
// greatest, and what would be 480 stands for no number and isn't used.
HEADRACE_INLINE float widen_e4m3(uint8_t a) {
    uint32_t sign = uint32_t(a & 0x80) << 24, magnitude = a & 0x7f;
    float value = magnitude < 8 ? float(magnitude) * 0x1p-9f : same_bits<float>((magnitude << 20) + 0x3c000000u);
    return same_bits<float>(sign | same_bits<uint32_t>(value));
}
// Round to nearest even, of numbers that round to 448 at most.
HEADRACE_INLINE uint8_t narrow_e4m3(float a) {
    uint32_t sign = (same_bits<uint32_t>(a) >> 24) & 0x80, magnitude = same_bits<uint32_t>(a) & 0x7fffffffu;
    uint32_t steps = same_bits<uint32_t>(same_bits<float>(magnitude) + 0x1p14f) - 0x46800000u; // of 2^-9
    uint32_t code = (magnitude - 0x3c000000u + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
    return uint8_t(sign | (magnitude < 0x3c800000u ? steps : code));
}

} // namespace headrace
