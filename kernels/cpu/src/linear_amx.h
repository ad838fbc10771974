// The linear operation on AMX.
//
// Weights are packed just as the matrix unit takes them: 16 steps of a tile (weights.h) are an operand for 16 outputs, a row
// for each step. So 32 bf16 or 64 int8 inputs of up to 32 rows and 32 outputs take four loads and four products:
//
//                       outputs 0..15    outputs 16..31
//                           6                 7         weights
//     rows 0..        4     0                 1
//     the others      5     2                 3
//                  inputs           sums
//
// A row's sums are added up in the same order whichever rows stand beside it.
#pragma once

#include "linear.h"
#include "simd_amx.h"

namespace headrace::HEADRACE_ISA {

// The lines that a block fetches, a few with each of its products: more would only get in the way of its loads.
class FetchedLines {
  public:
    FetchedLines(const Fetch& fetch, int64_t products)
        : at_(fetch.at), end_(fetch.at + fetch.groups * kLineBytes),
          each_((fetch.groups + products - 1) / products * kLineBytes) {}

    HEADRACE_INLINE void fetch() {
        const uint8_t* stop = std::min(at_ + each_, end_);
        for (; at_ < stop; at_ += kLineBytes) prefetch(at_);
    }

  private:
    const uint8_t *at_, *end_;
    int64_t each_;
};

// What formats have in common: the tiles, and their part of a product.
class MatrixMultiplier {
  public:
    static constexpr int kRows = 2 * kAmxRows;
    // More rows are faster multiplied at once than one by one with what the screen leaves of the head.
    static constexpr int64_t kMostScreened = kAmxRows;
    // It multiplies faster than memory reads: weights are shared for longer.
    static constexpr int64_t kDealtRows = 192;

    // One line for each group: a block's share of the next tile. Memory has no time for anything else.
    static void plan_fetches(const Weights& weights, int64_t tile, int64_t place, int64_t blocks, Ahead&, Block& block) {
        const int64_t share = weights.tile_bytes() / blocks;
        block.fetches[0] = {weights.tile(tile + 1) + place * share, share / kLineBytes};
    }

  protected:
    static constexpr int kSteps = kAmxRows; // of weights, in one product
    static constexpr int64_t kSumsBytes = kTileOutputs * 4;

    // Rows of a block that stand in the first tile of inputs.
    static int first_rows(int rows) { return rows <= kAmxRows ? rows : (rows + 1) / 2; }

    // Calls run(two, alone): whether there are rows in the second tile, and whether no other block follows on the weights.
    template <class Run> void with_tiles(int rows, bool alone, const Run& run) {
        const int first = first_rows(rows);
        tiles_.take(rows, [&](TileShapes& shapes) {
            for (int tile : {0, 1, 4}) shapes.set(tile, first, kAmxBytes);
            for (int tile : {2, 3, 5}) shapes.set(tile, rows - first, kAmxBytes);
            for (int tile : {6, 7}) shapes.set(tile, kSteps, kAmxBytes);
        });
        if (first == rows) {
            alone ? run(std::false_type(), std::true_type()) : run(std::false_type(), std::false_type());
        } else {
            alone ? run(std::true_type(), std::true_type()) : run(std::true_type(), std::false_type());
        }
    }

    template <bool kTwo> static HEADRACE_INLINE void zero_sums() {
        zero_tile<0>();
        zero_tile<1>();
        if constexpr (kTwo) {
            zero_tile<2>();
            zero_tile<3>();
        }
    }

    // Sums [rows, kTileOutputs] of 4 bytes.
    template <bool kTwo> static HEADRACE_INLINE void store_sums(void* sums, int first) {
        auto* bytes = static_cast<uint8_t*>(sums);
        store_tile<0>(bytes, kSumsBytes);
        store_tile<1>(bytes + kAmxBytes, kSumsBytes);
        if constexpr (kTwo) {
            store_tile<2>(bytes + first * kSumsBytes, kSumsBytes);
            store_tile<3>(bytes + first * kSumsBytes + kAmxBytes, kSumsBytes);
        }
    }

    // What is used once is kept out of the L1 cache: weights, if no other block of rows follows on them, else the rows.
    template <class Of, bool kTwo, bool kAlone>
    static HEADRACE_INLINE void add_product(const uint8_t* inputs, int64_t stride, int first, const uint8_t* weights) {
        take<4, kAlone>(inputs, stride);
        take<6, !kAlone>(weights, kStepBytes);
        add<Of, 0, 4, 6>();
        take<7, !kAlone>(weights + kAmxBytes, kStepBytes);
        add<Of, 1, 4, 7>();
        if constexpr (kTwo) {
            take<5, kAlone>(inputs + first * stride, stride);
            add<Of, 2, 5, 6>();
            add<Of, 3, 5, 7>();
        }
    }

  private:
    template <int kTile, bool kStays> static HEADRACE_INLINE void take(const uint8_t* rows, int64_t stride) {
        kStays ? load_tile<kTile>(rows, stride) : load_tile_once<kTile>(rows, stride);
    }

    template <class Of, int kSums, int kInputs, int kWeights> static HEADRACE_INLINE void add() {
        if constexpr (Of::kGrouped) {
            add_s8u8_product<kSums, kInputs, kWeights>();
        } else {
            add_bf16_product<kSums, kInputs, kWeights>();
        }
    }

    Tiles tiles_;
};

template <> class Multiplier<FormatBf16> : public MatrixMultiplier {
  public:
    void operator()(const Block& block, int rows, bool alone) {
        with_tiles(rows, alone, [&](auto two, auto is_alone) { multiply<two, is_alone>(block, rows); });
    }

  private:
    template <bool kTwo, bool kAlone> static void multiply(const Block& block, int rows) {
        const int first = first_rows(rows);
        const int64_t stride = block.x->stride_bytes, steps = block.weights->groups();
        const uint8_t* inputs = block.x->values + block.row * stride;
        const uint8_t* weights = block.weights->tile(block.tile);
        FetchedLines ahead(block.fetches[0], std::max<int64_t>(1, steps / kSteps));
        zero_sums<kTwo>();
        for (int64_t step = 0; step + kSteps <= steps; step += kSteps) {
            ahead.fetch();
            add_product<FormatBf16, kTwo, kAlone>(inputs + step * 4, stride, first, weights + step * kStepBytes);
        }
        if (const int64_t left = steps % kSteps) {
            // What stands behind them is somebody else's: here it is zeros.
            alignas(64) uint8_t last_inputs[kRows * kAmxBytes] = {}, last_weights[kSteps * kStepBytes] = {};
            for (int row = 0; row < rows; row++) {
                std::memcpy(last_inputs + row * kAmxBytes, inputs + row * stride + (steps - left) * 4, size_t(left) * 4);
            }
            std::memcpy(last_weights, weights + (steps - left) * kStepBytes, size_t(left) * kStepBytes);
            add_product<FormatBf16, kTwo, kAlone>(last_inputs, kAmxBytes, first, last_weights);
        }
        store_sums<kTwo>(block.sums, first);
    }
};

// A group's integers, and so a row's result, are those of the vector kernel.
template <> class Multiplier<FormatInt8> : public MatrixMultiplier {
    using Of = FormatInt8;
    static constexpr FormatLayout kLayout = layout_of(Of::kFormat);
    static_assert(kLayout.group_head == 0 && kLayout.group_bytes == kSteps * kStepBytes, "a product takes a group");

  public:
    void operator()(const Block& block, int rows, bool alone) {
        with_tiles(rows, alone, [&](auto two, auto is_alone) { multiply<two, is_alone>(block, rows); });
    }

  private:
    template <bool kTwo, bool kAlone> static void multiply(const Block& block, int rows) {
        alignas(64) int32_t integers[kFolded][kRows * kTileOutputs];
        const int first = first_rows(rows);
        const int64_t stride = block.x->stride_bytes, groups = block.weights->groups();
        const uint8_t* inputs = block.x->values + block.row * stride;
        const uint8_t* tile = block.weights->tile(block.tile);
        const float* scales = block.x->scales + block.row * groups;
        const int32_t* offsets = block.x->offsets + block.row * groups;
        FetchedLines ahead(block.fetches[0], groups);
        std::fill_n(block.sums, rows * kTileOutputs, 0.0f);
        for (int64_t group = 0; group < groups; group += kFolded) {
            const int count = int(std::min<int64_t>(kFolded, groups - group));
            for (int i = 0; i < count; i++) {
                ahead.fetch();
                zero_sums<kTwo>();
                add_product<Of, kTwo, kAlone>(inputs + (group + i) * kAmxBytes, stride, first,
                                              tile + kLayout.tile_head + (group + i) * kLayout.group_bytes);
                store_sums<kTwo>(integers[i], first);
            }
            as_constant<kFolded>(count, [&](auto folded) {
                fold<folded>(integers[0], rows, scales + group, offsets + group, groups, block.sums);
            });
        }
        for (int row = 0; row < rows; row++) {
            for (int output = 0; output < kTileOutputs; output += W) {
                float* sum = block.sums + row * kTileOutputs + output;
                store(sum, Of::finish(load(sum), tile, output));
            }
        }
    }

    static constexpr int kFolded = 4; // groups, whose integers stay in the L1 cache

    // Adds the integers of some groups to the sums.
    template <int kGroups>
    static HEADRACE_INLINE void fold(const int32_t* integers, int rows, const float* scales, const int32_t* offsets,
                                     int64_t groups, float* sums) {
        for (int row = 0; row < rows; row++) {
            HEADRACE_UNROLL
            for (int output = 0; output < kTileOutputs; output += W) {
                const int64_t at = row * kTileOutputs + output;
                F sum = load(sums + at);
                HEADRACE_UNROLL
                for (int group = 0; group < kGroups; group++) {
                    const I whole = add_int(load_bytes(integers + group * kRows * kTileOutputs + at),
                                            set1_int(offsets[row * groups + group]));
                    sum = Of::fold(sum, whole, {}, scales[row * groups + group], 0);
                }
                store(sums + at, sum);
            }
        }
    }
};

} // namespace headrace::HEADRACE_ISA
