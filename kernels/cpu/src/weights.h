// How packed weights lie in memory: the same bytes on every instruction set, so that a cache file serves every machine.
//
// A matrix of `outputs` rows and `inputs` columns is cut into tiles of 32 outputs, one behind the other; the last one is
// filled up with zeros. A tile runs through its inputs in steps, and each step holds, for all 32 outputs, the weights of
// as many inputs as fit in 4 bytes: 1 float, 2 bf16, 4 int8. The inputs of a product come in the same 4 bytes, so every
// format's inner loop is: take the next 4 bytes of each row, broadcast them, multiply by the next 128 bytes of weights.
//
//     bf16 tile, step s:  | w[n][2s] w[n][2s+1] | w[n+1][2s] w[n+1][2s+1] | ... | w[n+31][2s] w[n+31][2s+1] |
//                           lane 0                lane 1                         lane 31        128 bytes
//
// Formats with groups of inputs have a head before the steps of each group:
//
//     int8      tile:   32 float scales, then steps of 4 inputs; groups of 64 inputs, without a head of their own
//     int8g32   group:  32 half scales, then 8 steps of 4 inputs
//     u4g32     group:  32 half scales, 32 half minima, then 4 double steps of 8 inputs: in each byte the low nibble
//                       belongs to inputs 0..3 and the high nibble to inputs 4..7 of the double step
//
// int8 weights are stored with 128 added, as the unsigned side of the product; `formats.h` says how that is taken back.
#pragma once

#include "base.h"

namespace headrace {

enum class Format : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2, kInt8G32 = 3, kU4G32 = 4 };
constexpr int kFormats = 5;

constexpr int kTileOutputs = 32;
constexpr int kStepBytes = 128;

struct FormatLayout {
    int step_inputs;    // inputs in a step of 4 bytes
    int group_inputs;   // inputs are padded to a multiple of this
    int tile_head;      // bytes before a tile's steps
    int group_head;     // bytes before the steps of a group
    int group_bytes;    // bytes of a group, its head included
    int scale_inputs;   // inputs that share one scale of the activations; 0: they aren't quantised
};

constexpr FormatLayout kLayouts[kFormats] = {
    /*f32*/ {1, 1, 0, 0, 128, 0},          /*bf16*/ {2, 2, 0, 0, 128, 0},
    /*int8*/ {4, 64, 128, 0, 16 * 128, 64}, /*int8g32*/ {4, 32, 0, 64, 64 + 8 * 128, 32},
    /*u4g32*/ {4, 32, 0, 128, 128 + 4 * 128, 32},
};
constexpr const FormatLayout& layout_of(Format format) { return kLayouts[int(format)]; }

// A packed matrix. `bytes` begins at a multiple of 64.
struct Weights {
    Format format;
    int32_t reserved;
    int64_t outputs;
    int64_t inputs;
    const uint8_t* bytes;

    int64_t tiles() const { return (outputs + kTileOutputs - 1) / kTileOutputs; }
    int64_t groups() const { return (inputs + layout_of(format).group_inputs - 1) / layout_of(format).group_inputs; }
    int64_t tile_bytes() const { return layout_of(format).tile_head + groups() * layout_of(format).group_bytes; }
    int64_t total_bytes() const { return tiles() * tile_bytes(); }
    const uint8_t* tile(int64_t index) const { return bytes + index * tile_bytes(); }
};

// The rows that weights are multiplied with: float, bf16 or, quantised, int8, each row padded with zeros to whole groups.
struct Activations {
    const uint8_t* values;
    int64_t stride_bytes;
    const float* scales;       // [rows][groups], of quantised rows only
    const int32_t* offsets;    // [rows][groups]: -128 times the sum of the group's values
};

} // namespace headrace
