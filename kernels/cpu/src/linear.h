// The linear operation: rows of activations times packed weights, for every format, with an epilogue.
//
// Each output is summed over its inputs in one order, from the first to the last, whatever the number of rows, the tile
// and the thread: a row's result is the same bits in any company.
#pragma once

#include "epilogues.h"
#include "formats.h"
#include "team.h"

namespace headrace::HEADRACE_ISA {

// The micro-kernel holds kRows rows times kTiles * 2 vectors of sums in registers: on AVX-512 two vectors are a tile; a
// narrower instruction set passes over the tile in slices.
constexpr int kSliceVectors = 2;
constexpr int kSlices = kTileOutputs / (kSliceVectors * W);
constexpr int kPlainRows = W == 16 ? 14 : 4;  // a sum for each vector: 28 of 32 registers, or 8 of 16
constexpr int kGroupedRows = W == 16 ? 6 : 2; // and an integer sum beside it
constexpr int kFewRows = 2;                   // so few rows leave registers for several tiles side by side
constexpr int kFewTiles = 2;
constexpr int64_t kFetchBytes = 4096;         // how far a stream of weights is fetched ahead of its use
constexpr int64_t kCachedBytes = 512 * 1024;  // of activations that pass by all tiles together: they stay in the L2 cache

// A stream of cache lines to fetch while something else is computed: one in each step.
struct Prefetch {
    const uint8_t* at;
    int64_t step_bytes;
};

// Where the sums of one call start: the activations, the weights' tile and what to fetch meanwhile.
struct Block {
    const Weights* weights;
    const Activations* x;
    int64_t row, tile;
    Prefetch ahead;
    float* sums; // [kRows][kTiles * 32]
};

// One slice of a block, between the reading of weights and the writing of sums. kAlone: no other rows follow that would
// find these tiles in the cache, so what is worth fetching is their own later steps, not `ahead`.
template <class Of, int kRows, int kTiles, bool kAlone> struct Slice {
    static constexpr FormatLayout kLayout = layout_of(Of::kFormat);
    static constexpr int kVectors = kTiles * kSliceVectors;
    static constexpr int kLeaders = (kRows + 3) / 4;

    F sum[kRows][kVectors];
    const uint8_t* leader[kLeaders]; // rows 0, 4, 8, 12: 14 pointers wouldn't fit in registers, 4 and their strides do
    const uint8_t* step;
    const uint8_t* fetch;

    // The next 128 bytes of each tile, times the next 4 bytes of each row, or for a format of kParts the next 4 * kParts.
    template <int kParts, class Sums>
    HEADRACE_INLINE void advance(Sums& sums, int64_t stride, int64_t tile_bytes, int64_t fetch_bytes) {
        HEADRACE_UNROLL
        for (int part = 0; part < kParts; part++) {
            decltype(operand(step, part)) w[kVectors];
            HEADRACE_UNROLL
            for (int v = 0; v < kVectors; v++) {
                const uint8_t* at = step + v / kSliceVectors * tile_bytes + v % kSliceVectors * W * 4;
                w[v] = operand(at, part);
                if (kAlone && part == 0) __builtin_prefetch(at + kFetchBytes);
            }
            HEADRACE_UNROLL
            for (int m = 0; m < kRows; m++) {
                auto inputs = Of::inputs(leader[m / 4] + m % 4 * stride);
                HEADRACE_UNROLL
                for (int v = 0; v < kVectors; v++) sums[m][v] = Of::dot(sums[m][v], w[v], inputs);
            }
            HEADRACE_UNROLL
            for (int l = 0; l < kLeaders; l++) leader[l] += 4;
        }
        if constexpr (!kAlone) {
            __builtin_prefetch(fetch);
            fetch += fetch_bytes;
        }
        step += kStepBytes;
    }

    static HEADRACE_INLINE auto operand(const uint8_t* at, [[maybe_unused]] int part) {
        if constexpr (Of::kGrouped) {
            return Of::weights(at, part);
        } else {
            return Of::weights(at);
        }
    }
};

template <class Of, int kRows, int kTiles, bool kAlone>
__attribute__((noinline)) void multiply(const Block& block) {
    using This = Slice<Of, kRows, kTiles, kAlone>;
    constexpr FormatLayout layout = This::kLayout;
    const int64_t tile_bytes = block.weights->tile_bytes(), groups = block.weights->groups();
    const int64_t stride = block.x->stride_bytes;
    const uint8_t* tile = block.weights->tile(block.tile);
    for (int part = 0; part < kSlices; part++) {
        const int first_output = part * kSliceVectors * W;
        This slice;
        HEADRACE_UNROLL
        for (int m = 0; m < kRows; m++) {
            HEADRACE_UNROLL
            for (int v = 0; v < This::kVectors; v++) slice.sum[m][v] = zero();
        }
        HEADRACE_UNROLL
        for (int l = 0; l < This::kLeaders; l++) slice.leader[l] = block.x->values + (block.row + 4 * l) * stride;
        slice.step = tile + layout.tile_head + first_output * 4;
        slice.fetch = block.ahead.at;
        if constexpr (!Of::kGrouped) {
            for (int64_t i = 0; i < groups; i++)
                slice.template advance<1>(slice.sum, stride, tile_bytes, block.ahead.step_bytes);
        } else {
            const float* scales = block.x->scales + block.row * groups;
            const int32_t* offsets = block.x->offsets + block.row * groups;
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t* head = slice.step - first_output * 4;
                I integers[kRows][This::kVectors];
                HEADRACE_UNROLL
                for (int m = 0; m < kRows; m++) {
                    HEADRACE_UNROLL
                    for (int v = 0; v < This::kVectors; v++) integers[m][v] = Of::start(offsets[m * groups + g]);
                }
                slice.step += layout.group_head;
                for (int i = 0; i < (layout.group_bytes - layout.group_head) / kStepBytes; i++)
                    slice.template advance<Of::kParts>(integers, stride, tile_bytes, block.ahead.step_bytes);
                HEADRACE_UNROLL
                for (int v = 0; v < This::kVectors; v++) {
                    int output = first_output + v % kSliceVectors * W;
                    auto scale = Of::scale(head + v / kSliceVectors * tile_bytes, output);
                    HEADRACE_UNROLL
                    for (int m = 0; m < kRows; m++)
                        slice.sum[m][v] = Of::fold(slice.sum[m][v], integers[m][v], scale, scales[m * groups + g],
                                                   offsets[m * groups + g]);
                }
            }
        }
        HEADRACE_UNROLL
        for (int m = 0; m < kRows; m++) {
            HEADRACE_UNROLL
            for (int v = 0; v < This::kVectors; v++) {
                int output = first_output + v % kSliceVectors * W;
                F sum = slice.sum[m][v];
                if constexpr (Of::kGrouped) sum = Of::finish(sum, tile + v / kSliceVectors * tile_bytes, output);
                store(block.sums + (m * kTiles + v / kSliceVectors) * kTileOutputs + output, sum);
            }
        }
    }
}

using Kernel = void (*)(const Block&);

// The micro-kernels of a format by their number of rows, from 1 on.
template <class Of> struct Kernels {
    static constexpr int kRows = Of::kGrouped ? kGroupedRows : kPlainRows;
    template <int kTiles, bool kAlone, int... kLess>
    static constexpr auto list(std::integer_sequence<int, kLess...>) {
        return std::array<Kernel, sizeof...(kLess)>{multiply<Of, kLess + 1, kTiles, kAlone>...};
    }
    static constexpr auto kFew = list<kFewTiles, true>(std::make_integer_sequence<int, kFewRows>());
    static constexpr auto kAlone = list<1, true>(std::make_integer_sequence<int, kRows>());
    static constexpr auto kShared = list<1, false>(std::make_integer_sequence<int, kRows>());
};

// Every worker of `team` calls this with the same arguments save the epilogue, and meets the others at a barrier afterwards.
template <class Of, class Epilogue>
void linear_of(Team& team, const Weights& weights, const Activations& x, int64_t rows, const Epilogue& epilogue) {
    using Table = Kernels<Of>;
    const int64_t tiles = weights.tiles();
    const int64_t most = std::max<int64_t>(Table::kRows, kCachedBytes / x.stride_bytes / Table::kRows * Table::kRows);
    const int64_t passes = (rows + most - 1) / most;
    alignas(64) float sums[std::max(Table::kRows, kFewRows * kFewTiles) * kTileOutputs];

    auto finish = [&](const Block& block, int64_t count, int wide) {
        for (int64_t m = 0; m < count; m++)
            for (int t = 0; t < wide; t++) {
                int64_t column = (block.tile + t) * kTileOutputs;
                epilogue(block.row + m, column, block.sums + (m * wide + t) * kTileOutputs,
                         int(std::min<int64_t>(kTileOutputs, weights.outputs - column)));
            }
    };
    while (Range mine = team.claim(passes * tiles)) {
        for (int64_t piece = mine.begin; piece < mine.end; piece++) {
            const int64_t pass = piece / tiles, tile = piece % tiles;
            const int64_t begin = rows * pass / passes, end = rows * (pass + 1) / passes;
            const int64_t blocks = (end - begin + Table::kRows - 1) / Table::kRows;
            Block block{&weights, &x, begin, tile, {nullptr, 0}, sums};
            if (blocks == 1) {
                const int count = int(end - begin);
                const bool pair = count <= kFewRows && piece + 1 < mine.end && tile + 1 < tiles;
                (pair ? Table::kFew[count - 1] : Table::kAlone[count - 1])(block);
                finish(block, count, pair ? kFewTiles : 1);
                piece += pair;
                continue;
            }
            const int64_t share = weights.tile_bytes() / blocks;
            for (int64_t b = 0; b < blocks; b++) {
                block.row = begin + (end - begin) * b / blocks;
                const int64_t count = begin + (end - begin) * (b + 1) / blocks - block.row;
                block.ahead = {weights.tile(tile + 1) + b * share, (kStepBytes + blocks - 1) / blocks};
                Table::kShared[count - 1](block);
                finish(block, count, 1);
            }
        }
    }
}

template <class Epilogue>
void linear(Team& team, const Weights& weights, const Activations& x, int64_t rows, const Epilogue& epilogue) {
    switch (weights.format) {
    case Format::kF32: return linear_of<FormatF32>(team, weights, x, rows, epilogue);
    case Format::kBf16: return linear_of<FormatBf16>(team, weights, x, rows, epilogue);
    case Format::kInt8: return linear_of<FormatInt8>(team, weights, x, rows, epilogue);
    case Format::kInt8G32: return linear_of<FormatInt8G32>(team, weights, x, rows, epilogue);
    case Format::kU4G32: return linear_of<FormatU4G32>(team, weights, x, rows, epilogue);
    }
}

} // namespace headrace::HEADRACE_ISA
