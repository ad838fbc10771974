// The linear operation on AMX, a matrix unit: eight tiles of up to 16 rows of 64 bytes, and an instruction that adds the
// product of two of them to a third.
//
// Weights are packed just as it takes them: 16 steps of a tile (weights.h) are one operand for 16 outputs, a row for each
// step. So 32 bf16 inputs of up to 32 rows and 32 outputs take four loads and four products:
//
//                       outputs 0..15    outputs 16..31
//                          tile 6            tile 7      weights
//     rows 0..    tile 4   tile 0            tile 1
//     the others  tile 5   tile 2            tile 3
//       inputs                    sums
//
// The order of a row's sum doesn't depend on the rows beside it, as in the other kernels.
#pragma once

#include "linear.h"

namespace headrace::HEADRACE_ISA {

// How many rows the tiles have at present. They are given back when the work is done: a thread that holds none is
// switched faster.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (rows_) _tile_release();
    }

    static int first_rows(int rows) { return rows <= kMost ? rows : (rows + 1) / 2; }

    void take(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        Shape shape;
        const int first = first_rows(rows), second = rows - first;
        for (int tile : {0, 1, 4}) shape.set(tile, first);
        for (int tile : {2, 3, 5}) shape.set(tile, second);
        for (int tile : {6, 7}) shape.set(tile, kMost);
        _tile_loadconfig(&shape);
    }

  private:
    static constexpr int kMost = 16;
    struct alignas(64) Shape {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
        void set(int tile, int count) {
            rows[tile] = uint8_t(count);
            row_bytes[tile] = count ? 64 : 0;
        }
    };
    static_assert(sizeof(Shape) == 64);

    int rows_ = 0;
};

template <> class Multiplier<FormatBf16> {
  public:
    static constexpr int kRows = 32;

    void operator()(const Block& block, int rows, bool) {
        tiles_.take(rows);
        rows > 16 ? multiply<true>(block, rows) : multiply<false>(block, rows);
    }

  private:
    static constexpr int kSteps = 16; // of weights, in one product
    static constexpr int64_t kInputBytes = 64;

    template <bool kTwo> static void multiply(const Block& block, int rows) {
        const int first = Tiles::first_rows(rows);
        const int64_t stride = block.x->stride_bytes, steps = block.weights->groups();
        const uint8_t* inputs = block.x->values + block.row * stride;
        const uint8_t* weights = block.weights->tile(block.tile);
        Lines ahead(block);
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step + kSteps <= steps; step += kSteps) {
            ahead.fetch();
            add_product<kTwo>(inputs + step * 4, stride, first, weights + step * kStepBytes);
        }
        if (const int64_t left = steps % kSteps) {
            // What stands behind them is somebody else's: they are multiplied where zeros do.
            alignas(64) uint8_t last_inputs[kRows * kInputBytes] = {}, last_weights[kSteps * kStepBytes] = {};
            for (int row = 0; row < rows; row++) {
                std::memcpy(last_inputs + row * kInputBytes, inputs + row * stride + (steps - left) * 4, size_t(left) * 4);
            }
            std::memcpy(last_weights, weights + (steps - left) * kStepBytes, size_t(left) * kStepBytes);
            add_product<kTwo>(last_inputs, kInputBytes, first, last_weights);
        }
        constexpr int64_t kSumBytes = kTileOutputs * sizeof(float);
        _tile_stored(0, block.sums, kSumBytes);
        _tile_stored(1, block.sums + 16, kSumBytes);
        if constexpr (kTwo) {
            float* second = block.sums + first * kTileOutputs;
            _tile_stored(2, second, kSumBytes);
            _tile_stored(3, second + 16, kSumBytes);
        }
    }

    template <bool kTwo>
    static HEADRACE_INLINE void add_product(const uint8_t* inputs, int64_t stride, int first, const uint8_t* weights) {
        _tile_loadd(4, inputs, stride);
        _tile_loadd(6, weights, kStepBytes);
        _tile_loadd(7, weights + 64, kStepBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwo) {
            _tile_loadd(5, inputs + first * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    // The lines that a block fetches, so many with each product.
    class Lines {
      public:
        explicit Lines(const Block& block) : next_(block.fetches), end_(block.fetches + block.fetches_used) {}

        HEADRACE_INLINE void fetch() {
            for (int64_t left = kSteps; left > 0;) {
                while (groups_ == 0) {
                    if (next_ == end_) return;
                    at_ = next_->at;
                    groups_ = next_++->groups;
                }
                const int64_t count = std::min(left, groups_);
                for (int64_t i = 0; i < count; i++, at_ += kFetchedBytes<FormatBf16>) {
                    prefetch(at_);
                    prefetch(at_ + kLineBytes);
                }
                groups_ -= count;
                left -= count;
            }
        }

      private:
        const Fetch *next_, *end_;
        const uint8_t* at_ = nullptr;
        int64_t groups_ = 0;
    };

    Tiles tiles_;
};

} // namespace headrace::HEADRACE_ISA
