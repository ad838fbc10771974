#include "pack.h"

#include "half.h"

#include <vector>

namespace headrace {
namespace {

constexpr int kGroup = 32; // weights with a scale of their own in the grouped formats, and in GGUF's blocks

// 32 weights as scale * number + minimum.
struct Group {
    float scale, minimum;
    int8_t numbers[kGroup];
};

int64_t block_bytes(Source source) {
    switch (source) {
    case Source::kQ8_0: return 2 + 32;
    case Source::kQ4_0: return 2 + 16;
    case Source::kQ4_1: return 2 + 2 + 16;
    case Source::kQ4_K: return 2 + 2 + 12 + 128;
    default: return 0;
    }
}

float read_half(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return widen_f16(bits);
}

// The nibbles of 32 weights in 16 bytes: weight i is the low half of byte i, weight i + 16 the high half.
void read_nibbles(const uint8_t* at, int8_t* numbers) {
    for (int i = 0; i < 16; i++) {
        numbers[i] = int8_t(at[i] & 15);
        numbers[i + 16] = int8_t(at[i] >> 4);
    }
}

// Group `index` of a Q4_K row. A block of 256 has 8 groups, each with a scale and a minimum of 6 bits, packed in 12 bytes:
// the first four groups whole in bytes 0..7, of the last four the low halves in bytes 8..11 and the rest in the high two
// bits of bytes 0..7.
Group read_q4_k(const uint8_t* row, int64_t index) {
    const uint8_t* block = row + index / 8 * block_bytes(Source::kQ4_K);
    const uint8_t *six = block + 4, *nibbles = block + 16;
    const int g = int(index % 8);
    int scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | (six[g - 4] >> 6) << 4;
    int minimum = g < 4 ? six[g + 4] & 63 : (six[g + 4] >> 4) | (six[g] >> 6) << 4;
    Group group{read_half(block) * float(scale), -read_half(block + 2) * float(minimum), {}};
    for (int i = 0; i < kGroup; i++) // two groups share 32 bytes, the even one in the low halves
        group.numbers[i] = int8_t((nibbles[g / 2 * 32 + i] >> (4 * (g % 2))) & 15);
    return group;
}

Group read_group(const Row& row, int64_t index) {
    const uint8_t* bytes = static_cast<const uint8_t*>(row.at);
    const uint8_t* block = bytes + index * block_bytes(row.source);
    switch (row.source) {
    case Source::kQ8_0: {
        Group group{read_half(block), 0, {}};
        std::memcpy(group.numbers, block + 2, kGroup);
        return group;
    }
    case Source::kQ4_0: {
        Group group{read_half(block), -8 * read_half(block), {}};
        read_nibbles(block + 2, group.numbers);
        return group;
    }
    case Source::kQ4_1: {
        Group group{read_half(block), read_half(block + 2), {}};
        read_nibbles(block + 4, group.numbers);
        return group;
    }
    default: return read_q4_k(bytes, index);
    }
}

void read_floats(const Row& row, int64_t count, float* to) {
    const Source source = row.source;
    if (!row.at) {
        std::fill(to, to + count, 0.0f);
        return;
    }
    if (source == Source::kF32) {
        std::memcpy(to, row.at, size_t(count) * sizeof(float));
        return;
    }
    if (source == Source::kBf16 || source == Source::kF16) {
        const uint16_t* halves = static_cast<const uint16_t*>(row.at);
        for (int64_t i = 0; i < count; i++) to[i] = source == Source::kBf16 ? widen_bf16(halves[i]) : widen_f16(halves[i]);
        return;
    }
    for (int64_t i = 0; i < count; i += kGroup) {
        Group group = read_group(row, i / kGroup);
        for (int64_t j = 0; j < std::min<int64_t>(kGroup, count - i); j++)
            to[i + j] = group.scale * float(group.numbers[j]) + group.minimum;
    }
}

float largest_of(const float* from, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, std::fabs(from[i]));
    return largest;
}

// Floats as scale * -127..127, the largest at an end.
Group symmetric(const float* from) {
    Group group{largest_of(from, kGroup) / 127, 0, {}};
    float inverse = group.scale > 0 ? 1 / group.scale : 0;
    for (int i = 0; i < kGroup; i++) group.numbers[i] = int8_t(std::nearbyint(from[i] * inverse));
    return group;
}

// Floats as scale * 0..15 + minimum, smallest and largest at the ends; both rounded to halves first, as they are stored.
Group asymmetric(const float* from) {
    float low = *std::min_element(from, from + kGroup), high = *std::max_element(from, from + kGroup);
    Group group{widen_f16(narrow_f16((high - low) / 15)), widen_f16(narrow_f16(low)), {}};
    float inverse = group.scale > 0 ? 1 / group.scale : 0;
    for (int i = 0; i < kGroup; i++)
        group.numbers[i] = int8_t(std::min(15.0f, std::max(0.0f, std::nearbyint((from[i] - group.minimum) * inverse))));
    return group;
}

void write_half(uint8_t* at, float value) {
    uint16_t bits = narrow_f16(value);
    std::memcpy(at, &bits, sizeof bits);
}

// Where a lane's weight lies behind the head of its tile or group: steps of 4 inputs, 1 byte each, or for 4 bits double
// steps of 8 inputs, two to a byte.
int64_t byte_at(int lane, int64_t input) { return input / 4 * kStepBytes + lane * 4 + input % 4; }
int64_t nibble_at(int lane, int64_t input) { return input / 8 * kStepBytes + lane * 4 + input % 4; }
bool is_high(int64_t input) { return input % 8 >= 4; }

void write_floats(Format format, uint8_t* tile, int lane, const float* row, int64_t inputs) {
    if (format == Format::kF32) {
        for (int64_t i = 0; i < inputs; i++) std::memcpy(tile + i * kStepBytes + lane * 4, row + i, 4);
    } else if (format == Format::kBf16) {
        for (int64_t i = 0; i < inputs; i++) {
            uint16_t bits = narrow_bf16(row[i]);
            std::memcpy(tile + i / 2 * kStepBytes + lane * 4 + i % 2 * 2, &bits, sizeof bits);
        }
    } else {
        float scale = largest_of(row, inputs) / 127, inverse = scale > 0 ? 1 / scale : 0;
        std::memcpy(tile + lane * sizeof(float), &scale, sizeof scale);
        uint8_t* steps = tile + layout_of(format).tile_head;
        for (int64_t i = 0; i < inputs; i++)
            steps[byte_at(lane, i)] = uint8_t(128 + int(std::nearbyint(row[i] * inverse)));
    }
}

void write_group(Format format, uint8_t* group_bytes, int lane, const Group& group) {
    write_half(group_bytes + lane * 2, group.scale);
    uint8_t* steps = group_bytes + layout_of(format).group_head;
    if (format == Format::kInt8G32) {
        for (int i = 0; i < kGroup; i++) steps[byte_at(lane, i)] = uint8_t(128 + group.numbers[i]);
        return;
    }
    write_half(group_bytes + (kTileOutputs + lane) * 2, group.minimum);
    for (int i = 0; i < kGroup; i++) steps[nibble_at(lane, i)] |= uint8_t(group.numbers[i] << (is_high(i) ? 4 : 0));
}

bool keeps_its_numbers(Source source, Format format) {
    return format == Format::kInt8G32 ? source == Source::kQ8_0
                                      : format == Format::kU4G32 && block_bytes(source) > 0 && source != Source::kQ8_0;
}

void pack_row(const Weights& to, const Row& row, uint8_t* tile, int lane, std::vector<float>& floats) {
    if (to.format != Format::kInt8G32 && to.format != Format::kU4G32) {
        read_floats(row, to.inputs, floats.data());
        return write_floats(to.format, tile, lane, floats.data(), to.inputs);
    }
    const bool exact = row.at && to.inputs % kGroup == 0 && keeps_its_numbers(row.source, to.format);
    if (!exact) read_floats(row, to.inputs, floats.data());
    for (int64_t g = 0; g < to.groups(); g++) {
        const float* from = floats.data() + g * kGroup;
        Group group = exact                              ? read_group(row, g)
                      : to.format == Format::kInt8G32 ? symmetric(from)
                                                         : asymmetric(from);
        write_group(to.format, tile + g * layout_of(to.format).group_bytes, lane, group);
    }
}

} // namespace

void pack(Team& team, const Weights& to, const Row* rows, uint8_t* bytes) {
    team.run([&](int worker) {
        std::vector<float> floats(size_t((to.inputs + 63) / 64 * 64), 0.0f);
        while (Range mine = team.claim(worker, to.tiles()))
            for (int64_t t = mine.begin; t < mine.end; t++) {
                uint8_t* tile = bytes + t * to.tile_bytes();
                std::memset(tile, 0, size_t(to.tile_bytes()));
                for (int lane = 0; lane < kTileOutputs; lane++) {
                    int64_t output = t * kTileOutputs + lane;
                    pack_row(to, output < to.outputs ? rows[output] : Row{}, tile, lane, floats);
                }
            }
    });
}

void unpack_row(const Weights& weights, int64_t output, float* to) {
    const FormatLayout& layout = layout_of(weights.format);
    const uint8_t* tile = weights.tile(output / kTileOutputs);
    const int lane = int(output % kTileOutputs);
    const uint8_t* steps = tile + layout.tile_head;
    float scale = 1;
    switch (weights.format) {
    case Format::kF32:
        for (int64_t i = 0; i < weights.inputs; i++) std::memcpy(to + i, steps + i * kStepBytes + lane * 4, 4);
        return;
    case Format::kBf16:
        for (int64_t i = 0; i < weights.inputs; i++) {
            uint16_t bits;
            std::memcpy(&bits, steps + i / 2 * kStepBytes + lane * 4 + i % 2 * 2, sizeof bits);
            to[i] = widen_bf16(bits);
        }
        return;
    case Format::kInt8:
        std::memcpy(&scale, tile + lane * sizeof(float), sizeof scale);
        for (int64_t i = 0; i < weights.inputs; i++) to[i] = scale * float(int(steps[byte_at(lane, i)]) - 128);
        return;
    case Format::kInt8G32:
    case Format::kU4G32:
        for (int64_t i = 0; i < weights.inputs; i++) {
            const uint8_t* group = tile + i / kGroup * layout.group_bytes;
            const uint8_t* group_steps = group + layout.group_head;
            int64_t within = i % kGroup;
            scale = read_half(group + lane * 2);
            if (weights.format == Format::kInt8G32) {
                to[i] = scale * float(int(group_steps[byte_at(lane, within)]) - 128);
            } else {
                int number = (group_steps[nibble_at(lane, within)] >> (is_high(within) ? 4 : 0)) & 15;
                to[i] = scale * float(number) + read_half(group + (kTileOutputs + lane) * 2);
            }
        }
        return;
    }
}

} // namespace headrace
