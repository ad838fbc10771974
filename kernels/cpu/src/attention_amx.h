// The two products of attention on AMX.
//
// Pages hold keys and values just as the matrix unit takes them: of 16 tokens' keys a row for each pair of components, of
// their values a row for each pair of tokens.
//
//     scores [rows, 16 tokens]  +=  queries [rows, 32 components]  times  keys [16 pairs of components, 16 tokens]
//                0, 1                        4                                 5
//     sums [rows, 16 components]  +=  weights [rows, 16 tokens]  times  values [8 pairs of tokens, 16 components]
//                0 to 3                      6                               7
//
// Tokens are taken 16 at a time from the block's beginning on, and weights of 0 change no bit of a sum: as with vectors,
// what a row gets depends on its position alone.
#pragma once

#include "attention_products.h"
#include "simd_amx.h"

namespace headrace::HEADRACE_ISA {

template <> class BlockProducts<Bf16> : VectorProducts<Bf16> {
    using Element = uint16_t;
    using Block = KVBlock<Element>;
    static constexpr int kTokens = 16;                     // at a time
    static constexpr int kComponents = kAmxBytes / 2;      // of keys at a time
    static constexpr int kValueRows = kTokens / 2;
    static constexpr int kMostValues = 4;                  // tiles of sums at a time

  public:
    using VectorProducts::VectorProducts;

    template <class Query>
    void score(const Block& block, int64_t page_tokens, int64_t rows, const Query& query, float* scores, Stream* fetched) {
        if (!fits()) return VectorProducts::score(block, page_tokens, rows, query, scores, fetched);
        for_tiles<kAmxRows>(rows, [&](int64_t first, auto count) {
            alignas(64) Element queries[kAmxRows * kMostHeadSize];
            for (int r = 0; r < count; r++) {
                std::memcpy(queries + r * heads_.head_size, query(first + r), size_t(heads_.head_size) * sizeof(Element));
            }
            take(count);
            score_tile(block, page_tokens, queries, scores + first * kBlockTokens, first == 0 ? fetched : nullptr);
        });
    }

    void sum(const Block& block, int64_t rows, const Element* weights, float* sums, Stream* fetched) {
        if (!fits()) return VectorProducts::sum(block, rows, weights, sums, fetched);
        const int64_t size = heads_.head_size;
        for_tiles<kAmxRows>(rows, [&](int64_t first, auto count) {
            take(count);
            for (int64_t column = 0; column < size; column += kMostValues * W) {
                as_constant<kMostValues>(int(std::min<int64_t>(kMostValues, (size - column) / W)), [&](auto tiles) {
                    sum_tile<tiles>(block, weights + first * kBlockTokens, column, sums + first * size + column,
                                    first == 0 ? fetched : nullptr);
                });
            }
        });
    }

  private:
    bool fits() const { return heads_.head_size % kComponents == 0; }

    void take(int rows) {
        tiles_.take(rows, [&](TileShapes& shapes) {
            for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, rows, kAmxBytes);
            shapes.set(5, kComponents / 2, kAmxBytes);
            shapes.set(6, rows, kTokens * int(sizeof(Element)));
            shapes.set(7, kValueRows, kAmxBytes);
        });
    }

    void score_tile(const Block& block, int64_t page_tokens, const Element* queries, float* scores, Stream* fetched) {
        const int64_t size = heads_.head_size, stride = page_tokens * 4;
        for (int32_t s = 0; s < block.spans_used; s++) {
            const auto& span = block.spans[s];
            for (int32_t token = 0; token < span.count; token += kTokens) {
                const Element* keys = span.keys + (span.offset + token) * 2;
                zero_tile<0>();
                for (int64_t i = 0; i < size; i += kComponents) {
                    if (fetched) fetched->fetch(kComponents / 2);
                    load_tile<4>(queries + i, size * int64_t(sizeof(Element)));
                    load_tile<5>(keys + i * page_tokens, stride);
                    add_bf16_product<0, 4, 5>();
                }
                store_tile<0>(scores + span.token + token, kBlockTokens * int64_t(sizeof(float)));
            }
        }
    }

    template <int kSums>
    void sum_tile(const Block& block, const Element* weights, int64_t column, float* sums, Stream* fetched) {
        const int64_t size = heads_.head_size;
        zero_tiles<kSums>();
        for (int32_t s = 0; s < block.spans_used; s++) {
            const auto& span = block.spans[s];
            for (int32_t token = 0; token < span.count; token += kTokens) {
                if (fetched) fetched->fetch(kValueRows * kSums);
                const Element* values = span.values + (span.offset + token) * size + column * 2;
                load_tile<6>(weights + span.token + token, kBlockTokens * int64_t(sizeof(Element)));
                if (span.count - token >= kTokens) {
                    add_values<kSums>(values, size * 4);
                } else {
                    add_last_values<kSums>(values, span.count - token);
                }
            }
        }
        store_sums<kSums>(sums, size * int64_t(sizeof(float)));
    }

    // What stands behind the context's last token is another request's or nothing at all: here it is zeros.
    template <int kSums> void add_last_values(const Element* values, int tokens) {
        alignas(64) Element last[kValueRows][kSums * kComponents] = {};
        for (int token = 0; token < tokens; token++) {
            const Element* row = values + token / 2 * heads_.head_size * 2;
            for (int i = token % 2; i < kSums * kComponents; i += 2) last[token / 2][i] = row[i];
        }
        add_values<kSums>(last[0], kSums * kAmxBytes);
    }

    template <int kSums> static HEADRACE_INLINE void zero_tiles() {
        zero_tile<0>();
        if constexpr (kSums > 1) zero_tile<1>();
        if constexpr (kSums > 2) zero_tile<2>();
        if constexpr (kSums > 3) zero_tile<3>();
    }

    template <int kSums> static HEADRACE_INLINE void add_values(const Element* values, int64_t stride) {
        load_tile<7>(values, stride);
        add_bf16_product<0, 6, 7>();
        if constexpr (kSums > 1) {
            load_tile<7>(values + kComponents, stride);
            add_bf16_product<1, 6, 7>();
        }
        if constexpr (kSums > 2) {
            load_tile<7>(values + 2 * kComponents, stride);
            add_bf16_product<2, 6, 7>();
        }
        if constexpr (kSums > 3) {
            load_tile<7>(values + 3 * kComponents, stride);
            add_bf16_product<3, 6, 7>();
        }
    }

    template <int kSums> static HEADRACE_INLINE void store_sums(float* sums, int64_t stride) {
        store_tile<0>(sums, stride);
        if constexpr (kSums > 1) store_tile<1>(sums + W, stride);
        if constexpr (kSums > 2) store_tile<2>(sums + 2 * W, stride);
        if constexpr (kSums > 3) store_tile<3>(sums + 3 * W, stride);
    }

    Tiles tiles_;
};

} // namespace headrace::HEADRACE_ISA
