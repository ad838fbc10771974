// AMX, a matrix unit beside the vectors of simd_avx512.h: eight tiles of up to 16 rows of 64 bytes, and an instruction that
// multiplies two of them and adds the product to a third.
//
// These are assembly and not intrinsics, because GCC's say nothing of the memory that they read: what has been stored there
// before may be left out.
#pragma once

namespace headrace::HEADRACE_ISA {

constexpr int kAmxRows = 16;
constexpr int kAmxBytes = 64; // of a row

template <int kTile> HEADRACE_INLINE void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(kTile)); }
// Rows that are `stride` bytes apart.
template <int kTile> HEADRACE_INLINE void load_tile(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}
// Likewise, and they need not stay in the L1 cache.
template <int kTile> HEADRACE_INLINE void load_tile_once(const void* rows, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile> HEADRACE_INLINE void store_tile(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}
// sums [m, n] of floats += a [m, 2k] of bf16 times b [k, n] of pairs of them: first all first ones of a pair, then all
// second ones, each sum in the order of k.
template <int kSums, int kA, int kB> HEADRACE_INLINE void add_bf16_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}
// sums [m, n] of integers += a [m, 4k] of signed bytes times b [k, n] of four unsigned bytes, exactly.
template <int kSums, int kA, int kB> HEADRACE_INLINE void add_s8u8_product() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// How the eight tiles are laid out.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int count, int bytes) {
        rows[tile] = uint8_t(count);
        row_bytes[tile] = uint16_t(count ? bytes : 0);
    }
};
static_assert(sizeof(TileShapes) == 64);

// A worker's hold of the tiles. It gives them back at its end: a thread that holds none is switched faster.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (rows_) asm volatile("tilerelease");
    }

    // Lays them out for so many rows as `shape(shapes)` says, unless they are: that takes as long as 15 products.
    template <class Shape> HEADRACE_INLINE void take(int rows, const Shape& shape) {
        if (rows == rows_) return;
        rows_ = rows;
        TileShapes shapes;
        shape(shapes);
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }

  private:
    int rows_ = 0;
};

} // namespace headrace::HEADRACE_ISA
