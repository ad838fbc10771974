// The linear operation: rows of activations times packed weights, for every format, with an epilogue.
//
// Each output is summed over its inputs in one order, from the first to the last, whatever the number of rows, the block
// and the thread: a row's result is the same bits in any company.
#pragma once

#include "ahead.h"
#include "epilogues.h"
#include "formats.h"

namespace headrace::HEADRACE_ISA {

// The micro-kernel holds the sums of kRows rows and of two vectors of outputs in registers. On AVX-512 two vectors are a
// tile; a narrower instruction set passes over the tile in slices.
constexpr int kVectors = 2;
constexpr int kPlainRows = W == 16 ? 14 : 4;  // one sum for each vector: 28 of 32 registers, or 8 of 16
constexpr int kGroupedRows = W == 16 ? 6 : 2; // and an integer sum beside it

// Weights come from memory, and the core must ask for them early. Three cases, each the fastest of those measured:
//   - few rows: bandwidth is all, and every second line is enough, since the hardware fetches lines in pairs;
//   - one block of more rows: both lines, from further away;
//   - several blocks of rows that pass by a tile: together they fetch the next tile, and then something else that is wanted
//     soon. Integers make more steps of a tile, so that a line with each is enough.
// All of it goes to the L2 cache. The L1 cache's few outstanding misses are left to the loads.
constexpr int kFewRows = 5;
constexpr int64_t kNearBytes = 4 * 1024, kFarBytes = 16 * 1024;
template <class Of> constexpr int64_t kFetchedBytes = Of::kGrouped ? kLineBytes : 2 * kLineBytes; // with each step
constexpr int64_t kCachedBytes = 512 * 1024; // of activations that pass by all tiles together: they stay in the L2 cache

// From `at` on, a line is fetched with each step of so many groups.
struct Fetch {
    const uint8_t* at;
    int64_t groups;
};
constexpr int kMostFetches = 10;

// What a micro-kernel is called with.
struct Block {
    const Weights* weights;
    const Activations* x;
    float* sums;                 // [kRows][32], the result
    int64_t row, tile;           // the first row, and the tile
    int fetches_used;
    Fetch fetches[kMostFetches]; // one after the other; all groups together are those of the tile
};

// The positions of a micro-kernel in its streams.
template <class Of, int kRows, bool kAlone> struct Cursor {
    static constexpr int kLeaders = (kRows + 3) / 4;

    const uint8_t* leader[kLeaders]; // rows 0, 4, 8, 12: 14 pointers wouldn't fit in registers, 4 and their strides do
    int64_t stride;
    const uint8_t* step;
    const uint8_t* ahead;

    HEADRACE_INLINE void fetch() {
        if constexpr (!kAlone) {
            HEADRACE_UNROLL
            for (int64_t line = 0; line < kFetchedBytes<Of>; line += kLineBytes) prefetch(ahead + line);
            ahead += kFetchedBytes<Of>;
        } else if constexpr (Of::kGrouped || kRows <= kFewRows) {
            prefetch(step + kNearBytes);
        } else {
            prefetch(step + kFarBytes);
            prefetch(step + kFarBytes + kStepBytes / 2);
        }
    }

    // Multiplies the next 128 bytes of weights with the next 4 bytes of each row, as often as the weights unpack to.
    HEADRACE_INLINE void advance(typename Of::Sum (&sum)[kRows][kVectors]) {
        fetch();
        HEADRACE_UNROLL
        for (int part = 0; part < Of::kParts; part++) {
            decltype(Of::weights(step, part)) weights[kVectors];
            HEADRACE_UNROLL
            for (int v = 0; v < kVectors; v++) weights[v] = Of::weights(step + v * W * 4, part);
            HEADRACE_UNROLL
            for (int m = 0; m < kRows; m++) {
                auto inputs = Of::inputs(leader[m / 4] + m % 4 * stride);
                HEADRACE_UNROLL
                for (int v = 0; v < kVectors; v++) sum[m][v] = Of::dot(sum[m][v], weights[v], inputs);
            }
            HEADRACE_UNROLL
            for (int l = 0; l < kLeaders; l++) leader[l] += 4;
        }
        step += kStepBytes;
    }
};

template <class Of> constexpr int group_steps() {
    return (layout_of(Of::kFormat).group_bytes - layout_of(Of::kFormat).group_head) / kStepBytes;
}

// The micro-kernel. A grouped format has two levels of sums: integers within a group, which `fold` adds to the floats with
// the scales of the group's weights and activations. kAlone: no other block of rows follows on the same tile.
template <class Of, int kRows, bool kAlone> __attribute__((noinline)) void multiply(const Block& block) {
    constexpr FormatLayout layout = layout_of(Of::kFormat);
    const int64_t groups = block.weights->groups();
    const uint8_t* tile = block.weights->tile(block.tile);
    for (int first = 0; first < kTileOutputs; first += kVectors * W) { // an output of the tile
        F sum[kRows][kVectors];
        Cursor<Of, kRows, kAlone> at;
        HEADRACE_UNROLL
        for (int m = 0; m < kRows; m++) {
            HEADRACE_UNROLL
            for (int v = 0; v < kVectors; v++) sum[m][v] = zero();
        }
        at.stride = block.x->stride_bytes;
        HEADRACE_UNROLL
        for (int l = 0; l < at.kLeaders; l++) at.leader[l] = block.x->values + (block.row + 4 * l) * at.stride;
        at.step = tile + layout.tile_head + first * 4;
        const float* scales = block.x->scales + block.row * groups;
        const int32_t* offsets = block.x->offsets + block.row * groups;
        for (int f = 0; f < block.fetches_used; f++) {
            const Fetch& fetch = block.fetches[f];
            at.ahead = fetch.at;
            for (int64_t i = 0; i < fetch.groups; i++) {
                if constexpr (!Of::kGrouped) {
                    at.advance(sum);
                } else {
                    const uint8_t* head = at.step - first * 4;
                    at.step += layout.group_head;
                    typename Of::Sum integers[kRows][kVectors];
                    HEADRACE_UNROLL
                    for (int m = 0; m < kRows; m++) {
                        HEADRACE_UNROLL
                        for (int v = 0; v < kVectors; v++) integers[m][v] = Of::start(offsets[m * groups]);
                    }
                    for (int j = 0; j < group_steps<Of>(); j++) at.advance(integers);
                    HEADRACE_UNROLL
                    for (int v = 0; v < kVectors; v++) {
                        auto scale = Of::scale(head, first + v * W);
                        HEADRACE_UNROLL
                        for (int m = 0; m < kRows; m++)
                            sum[m][v] = Of::fold(sum[m][v], integers[m][v], scale, scales[m * groups], offsets[m * groups]);
                    }
                    scales++;
                    offsets++;
                }
            }
        }
        HEADRACE_UNROLL
        for (int m = 0; m < kRows; m++) {
            HEADRACE_UNROLL
            for (int v = 0; v < kVectors; v++) {
                int output = first + v * W;
                store(block.sums + m * kTileOutputs + output, Of::finish(sum[m][v], tile, output));
            }
        }
    }
}

// Calls body(Of()) with the arithmetic of a format.
template <class Body> HEADRACE_INLINE void with_format(Format format, const Body& body) {
    switch (format) {
    case Format::kF32: return body(FormatF32());
    case Format::kBf16: return body(FormatBf16());
    case Format::kInt8: return body(FormatInt8());
    case Format::kInt8G32: return body(FormatInt8G32());
    case Format::kU4G32: return body(FormatU4G32());
    }
}

// Multiplies a block of up to kRows rows with a tile, for one worker: here by the micro-kernel for their number. A matrix
// unit has a specialisation of its own.
template <class Of> class Multiplier {
  public:
    static constexpr int kRows = Of::kGrouped ? kGroupedRows : kPlainRows;
    // So many rows at most take less time with a screen of the head (screen.h).
    static constexpr int64_t kMostScreened = std::numeric_limits<int64_t>::max();
    // From so many rows for each worker on, multiplying takes so long that each may read all weights meanwhile.
    static constexpr int64_t kDealtRows = 24;

    void operator()(const Block& block, int rows, bool alone) {
        using Kernel = void (*)(const Block&);
        static constexpr auto kAlone = list<true, Kernel>(std::make_integer_sequence<int, kRows>());
        static constexpr auto kShared = list<false, Kernel>(std::make_integer_sequence<int, kRows>());
        (alone ? kAlone : kShared)[size_t(rows - 1)](block);
    }

    // What one of `blocks` blocks that pass by a tile fetches: its share of the next tile, then strips of `also`. If steps
    // are left, they ask for what is on its way already.
    static void plan_fetches(const Weights& weights, int64_t tile, int64_t place, int64_t blocks, Ahead& also,
                             Block& block) {
        constexpr int64_t kGroupBytes = group_steps<Of>() * kFetchedBytes<Of>;
        const int64_t share = weights.tile_bytes() / blocks;
        const uint8_t* next = weights.tile(tile + 1) + place * share;
        int64_t left = weights.groups();
        block.fetches_used = 0;
        auto add = [&](const uint8_t* at, int64_t bytes) {
            const int64_t groups = std::min(left, (bytes + kGroupBytes - 1) / kGroupBytes);
            left -= groups;
            block.fetches[block.fetches_used++] = {at, groups};
        };
        add(next, blocks == 1 ? left * kGroupBytes : share);
        while (left > 0 && block.fetches_used + 1 < kMostFetches) {
            const Strip strip = also.take(left * kGroupBytes);
            if (strip.bytes == 0) break;
            add(strip.begin, strip.bytes);
        }
        add(next, left * kGroupBytes);
    }

  private:
    template <bool kAlone, class Kernel, int... kLess>
    static constexpr auto list(std::integer_sequence<int, kLess...>) {
        return std::array<Kernel, sizeof...(kLess)>{multiply<Of, kLess + 1, kAlone>...};
    }
};

// A tile for the rows of one pass: block after block while the tile is in the cache.
template <class Of, class Epilogue>
void multiply_tile(Multiplier<Of>& multiplier, const Weights& weights, const Activations& x, int64_t begin, int64_t end,
                   int64_t tile, const Epilogue& epilogue, Ahead& also) {
    constexpr int64_t kRows = Multiplier<Of>::kRows;
    alignas(64) float sums[kRows * kTileOutputs];
    const int64_t column = tile * kTileOutputs;
    const int outputs = int(std::min<int64_t>(kTileOutputs, weights.outputs - column));
    const int64_t blocks = (end - begin + kRows - 1) / kRows;
    Block block{&weights, &x, sums, 0, tile, 0, {}};
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = begin + (end - begin) * b / blocks;
        const int64_t count = begin + (end - begin) * (b + 1) / blocks - row;
        block.row = row;
        Multiplier<Of>::plan_fetches(weights, tile, b, blocks, also, block);
        multiplier(block, int(count), blocks == 1);
        for (int64_t m = 0; m < count; m++) epilogue(row + m, column, sums + m * kTileOutputs, outputs);
    }
}

// Rows that pass by all tiles together: pass i has the rows `rows_of(i)`.
template <class RowsOf> struct Passes {
    int64_t count;
    RowsOf rows_of;
};
template <class RowsOf> Passes(int64_t, RowsOf) -> Passes<RowsOf>;

// Rows in passes of so few that they stay in the cache.
template <class Of> auto passes_of(int64_t rows, int64_t stride_bytes) {
    constexpr int64_t kBlock = Multiplier<Of>::kRows;
    const int64_t most = std::max(kBlock, kCachedBytes / stride_bytes / kBlock * kBlock);
    const int64_t count = (rows + most - 1) / most;
    return Passes{count, [=](int64_t pass) { return Range{rows * pass / count, rows * (pass + 1) / count}; }};
}

// Every worker of `team` calls this with the same arguments save the epilogue, and meets the others at a barrier
// afterwards. `also` is what to fetch meanwhile.
template <class Of, class RowsOf, class Epilogue>
void linear_passes(Team& team, int worker, const Weights& weights, const Activations& x, const Passes<RowsOf>& passes,
                   const Epilogue& epilogue, Ahead& also) {
    const int64_t tiles = weights.tiles();
    Multiplier<Of> multiplier;
    while (Range mine = team.claim(worker, passes.count * tiles)) {
        for (int64_t piece = mine.begin; piece < mine.end; piece++) {
            const Range rows = passes.rows_of(piece / tiles);
            multiply_tile(multiplier, weights, x, rows.begin, rows.end, piece % tiles, epilogue, also);
        }
    }
}

// The rows 0..rows, likewise.
template <class Epilogue>
void linear(Team& team, int worker, const Weights& weights, const Activations& x, int64_t rows, const Epilogue& epilogue,
            Ahead& also) {
    with_format(weights.format, [&](auto of) {
        using Of = decltype(of);
        linear_passes<Of>(team, worker, weights, x, passes_of<Of>(rows, x.stride_bytes), epilogue, also);
    });
}

} // namespace headrace::HEADRACE_ISA
