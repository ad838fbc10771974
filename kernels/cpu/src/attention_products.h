// The two products of attention over one block of keys and values, for the rows of a piece: by vectors, a tile of rows at
// once. A matrix unit has a specialisation of its own.
#pragma once

#include "kv_block.h"
#include "tiles.h"

namespace headrace::HEADRACE_ISA {

template <class T> class VectorProducts {
    using Element = typename T::Element;
    static constexpr int64_t kPerWord = T::kPerWord;

  public:
    explicit VectorProducts(const HeadShape& heads) : heads_(heads) {}

    // Scores [rows, kBlockTokens] of the block's tokens; `query(row)` has head_size elements. What is to be fetched
    // meanwhile, if anything is, is fetched with the first tile of rows.
    template <class Query>
    void score(const KVBlock<Element>& block, int64_t page_tokens, int64_t rows, const Query& query, float* scores,
               Stream* fetched) {
        for_row_tiles(rows, [&](int64_t row, auto count) {
            const Element* queries[count];
            for (int r = 0; r < count; r++) queries[r] = query(row + r);
            score_tile<count>(block, page_tokens, queries, scores + row * kBlockTokens, row == 0 ? fetched : nullptr);
        });
    }

    // Sums [rows, head_size] of the block's values, each with its weight of [rows, kBlockTokens].
    void sum(const KVBlock<Element>& block, int64_t rows, const Element* weights, float* sums, Stream* fetched) {
        const int64_t size = heads_.head_size;
        for_row_tiles(rows, [&](int64_t row, auto count) {
            const Element* of_rows = weights + row * kBlockTokens;
            float* out = sums + row * size;
            Stream* with_first = row == 0 ? fetched : nullptr;
            for_tiles<tile_vectors(count)>(size / W, [&](int64_t vector, auto vectors) {
                sum_tile<count, vectors, false>(block, of_rows, vector * W, out + vector * W, with_first);
            });
            if (size % W) sum_tile<count, 1, true>(block, of_rows, size / W * W, out + size / W * W, with_first);
        });
    }

  private:
    // Scores of R rows.
    template <int R>
    HEADRACE_INLINE void score_tile(const KVBlock<Element>& block, int64_t page_tokens, const Element* const* queries,
                                    float* out, Stream* fetched) {
        const Element* keys[kBlockTokens / W];
        int64_t vectors = 0;
        for (int32_t s = 0; s < block.spans_used; s++) {
            const auto& span = block.spans[s];
            for (int32_t token = 0; token < span.count; token += W) {
                keys[vectors++] = span.keys + (span.offset + token) * kPerWord;
            }
        }
        const int64_t words = heads_.head_size / kPerWord, stride = page_tokens * kPerWord;
        for_tiles<tile_vectors(R)>(vectors, [&](int64_t first, auto count) {
            constexpr int N = count;
            F sums[R][N];
            HEADRACE_UNROLL
            for (int r = 0; r < R; r++) {
                HEADRACE_UNROLL
                for (int j = 0; j < N; j++) sums[r][j] = zero();
            }
            for (int64_t word = 0; word < words; word++) {
                typename T::Words key[N];
                HEADRACE_UNROLL
                for (int j = 0; j < N; j++) key[j] = T::read_words(keys[first + j] + word * stride, W);
                if (fetched) fetched->fetch(N);
                HEADRACE_UNROLL
                for (int r = 0; r < R; r++) {
                    typename T::Words query = T::broadcast_word(queries[r] + word * kPerWord);
                    HEADRACE_UNROLL
                    for (int j = 0; j < N; j++) sums[r][j] = T::dot(sums[r][j], query, key[j]);
                }
            }
            const int64_t token = block.first + first * W;
            HEADRACE_UNROLL
            for (int r = 0; r < R; r++) {
                HEADRACE_UNROLL
                for (int j = 0; j < N; j++) {
                    store(out + r * kBlockTokens + token + j * W, sums[r][j]);
                }
            }
        });
    }

    // Weighted values of R rows, N vectors of their components from `column` on.
    template <int R, int N, bool kTail>
    HEADRACE_INLINE void sum_tile(const KVBlock<Element>& block, const Element* rows, int64_t column, float* out,
                                  Stream* fetched) {
        const int64_t size = heads_.head_size;
        const int lanes = kTail ? int(size - column) : W;
        F sums[R][N];
        HEADRACE_UNROLL
        for (int r = 0; r < R; r++) {
            HEADRACE_UNROLL
            for (int j = 0; j < N; j++) sums[r][j] = zero();
        }
        for (int32_t s = 0; s < block.spans_used; s++) {
            const auto& span = block.spans[s];
            const Element* values = span.values + (span.offset / kPerWord * size + column) * kPerWord;
            const Element* weights = rows + span.token;
            auto step = [&](int64_t word, auto half) {
                typename T::Words value[N];
                HEADRACE_UNROLL
                for (int j = 0; j < N; j++) {
                    value[j] = T::read_words(values + (word * size + j * W) * kPerWord, lanes);
                    if (half) value[j] = T::first_elements(value[j]);
                }
                if (fetched) fetched->fetch(N);
                HEADRACE_UNROLL
                for (int r = 0; r < R; r++) {
                    typename T::Words weight = T::broadcast_word(weights + r * kBlockTokens + word * kPerWord);
                    HEADRACE_UNROLL
                    for (int j = 0; j < N; j++) sums[r][j] = T::dot(sums[r][j], weight, value[j]);
                }
            };
            const int64_t words = span.count / kPerWord;
            for (int64_t word = 0; word < words; word++) step(word, std::false_type());
            // What stands behind the context's last token is another request's or nothing at all.
            if (span.count % kPerWord) step(words, std::true_type());
        }
        HEADRACE_UNROLL
        for (int r = 0; r < R; r++) {
            HEADRACE_UNROLL
            for (int j = 0; j < N; j++) F32::write(out + r * size + j * W, sums[r][j], lanes);
        }
    }

  protected:
    const HeadShape& heads_;
};

template <class T> class BlockProducts : public VectorProducts<T> {
    using VectorProducts<T>::VectorProducts;
};

} // namespace headrace::HEADRACE_ISA
