// What the micro-kernel of `linear.h` must know about each format of weights: how to read a step, what to multiply, and,
// where inputs come in groups, how a group's integers become part of the sum.
//
// The unsigned side of an integer product is the weights. For int8 that is w + 128, and what this adds, 128 times the
// sum of the group's activations, is one number for each row and group: the integer sum starts from its negative, which
// `quantize.h` has left in `Activations::offsets`. For 4 bits a weight is scale * nibble + minimum, and the minimum's part
// is minimum times the sum of the activations: the same number, divided by -128.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// kParts: the operands that 128 bytes of weights unpack to.
struct Floats {
    using Sum = F;
    static constexpr bool kGrouped = false;
    static constexpr int kParts = 1;
    static HEADRACE_INLINE F finish(F sum, const uint8_t*, int) { return sum; }
};

struct FormatF32 : Floats {
    static constexpr Format kFormat = Format::kF32;
    static HEADRACE_INLINE F weights(const uint8_t* step, int) { return load(reinterpret_cast<const float*>(step)); }
    static HEADRACE_INLINE F inputs(const uint8_t* four) { return set1(*reinterpret_cast<const float*>(four)); }
    static HEADRACE_INLINE F dot(F sum, F weights, F inputs) { return fma(weights, inputs, sum); }
};

struct FormatBf16 : Floats {
    static constexpr Format kFormat = Format::kBf16;
    static HEADRACE_INLINE Pairs weights(const uint8_t* step, int) {
        return load_pairs(reinterpret_cast<const uint16_t*>(step));
    }
    static HEADRACE_INLINE Pairs inputs(const uint8_t* four) {
        return broadcast_pair(reinterpret_cast<const uint16_t*>(four));
    }
    static HEADRACE_INLINE F dot(F sum, Pairs weights, Pairs inputs) { return dot_bf16(sum, weights, inputs); }
};

struct Integers {
    using Sum = I;
    static constexpr bool kGrouped = true;
    static HEADRACE_INLINE Bytes inputs(const uint8_t* four) { return broadcast_bytes(four); }
    static HEADRACE_INLINE I dot(I sum, Bytes weights, Bytes inputs) { return dot_u8s8(sum, weights, inputs); }
    static HEADRACE_INLINE F finish(F sum, const uint8_t*, int) { return sum; }
};

struct FormatInt8 : Integers {
    static constexpr Format kFormat = Format::kInt8;
    static constexpr int kParts = 1;
    struct Scale {};
    static HEADRACE_INLINE Bytes weights(const uint8_t* step, int) { return load_bytes(step); }
    static HEADRACE_INLINE I start(int32_t offset) { return set1_int(offset); }
    static HEADRACE_INLINE Scale scale(const uint8_t*, int) { return {}; }
    static HEADRACE_INLINE F fold(F sum, I group, Scale, float scale, int32_t) {
        return fma(to_float(group), set1(scale), sum);
    }
    static HEADRACE_INLINE F finish(F sum, const uint8_t* tile_head, int output) {
        return mul(sum, load(reinterpret_cast<const float*>(tile_head) + output));
    }
};

struct FormatInt8G32 : Integers {
    static constexpr Format kFormat = Format::kInt8G32;
    static constexpr int kParts = 1;
    struct Scale {
        F scale;
    };
    static HEADRACE_INLINE Bytes weights(const uint8_t* step, int) { return load_bytes(step); }
    static HEADRACE_INLINE I start(int32_t offset) { return set1_int(offset); }
    static HEADRACE_INLINE Scale scale(const uint8_t* group_head, int output) {
        return {load_f16(reinterpret_cast<const uint16_t*>(group_head) + output)};
    }
    static HEADRACE_INLINE F fold(F sum, I group, Scale weight, float scale, int32_t) {
        return fma(to_float(group), mul(weight.scale, set1(scale)), sum);
    }
};

struct FormatU4G32 : Integers {
    static constexpr Format kFormat = Format::kU4G32;
    static constexpr int kParts = 2;
    struct Scale {
        F scale, minimum;
    };
    static HEADRACE_INLINE Bytes weights(const uint8_t* step, int part) {
        return part ? high_nibbles(load_bytes(step)) : low_nibbles(load_bytes(step));
    }
    static HEADRACE_INLINE I start(int32_t) { return set1_int(0); }
    static HEADRACE_INLINE Scale scale(const uint8_t* group_head, int output) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(group_head) + output;
        return {load_f16(halves), mul(load_f16(halves + kTileOutputs), set1(-1.0f / 128))};
    }
    static HEADRACE_INLINE F fold(F sum, I group, Scale weight, float scale, int32_t offset) {
        F minima = mul(weight.minimum, to_float(set1_int(offset)));
        return fma(fma(to_float(group), weight.scale, minima), set1(scale), sum);
    }
};

} // namespace headrace::HEADRACE_ISA
