// The keys and values of one block of a context: where they stand, and how attention comes to them.
//
//   InPlace    bf16 and float32 are multiplied as they stand in the pages
//   Expanded   numbers of a byte become T in memory that stays in the cache, as if on one page of kBlockTokens: first the
//              keys, and when they are done with, in their place the values. Scores are multiplied with the scales of
//              keys, and weights with those of values, so that what is expanded are exactly the numbers.
#pragma once

#include "attention_plan.h"
#include "kv_numbers.h"
#include "stream.h"

namespace headrace::HEADRACE_ISA {

// What the rows of a piece see of one block: tokens first..end of it, on up to kBlockTokens / kPageTokens pages.
template <class Number> struct KVBlock {
    // Consecutive tokens that stand on one page.
    struct Span {
        const Number* keys; // of the head on this page
        const Number* values;
        int32_t offset; // of the first token on the page
        int32_t token;  // the first token, in the block
        int32_t count;
    };
    Span spans[kBlockTokens / kPageTokens];
    int32_t spans_used;
    int32_t first; // a multiple of W: the first seen one's vector
    int32_t end;
};

template <class T> class InPlace {
  public:
    using Number = typename T::Element;
    static constexpr bool kFetches = false;

    InPlace(const HeadShape& heads, float*) : heads_(heads) {}

    int64_t page_tokens() const { return heads_.page_tokens; }
    const KVBlock<Number>& keys(const KVBlock<Number>& block, Stream&) { return block; }
    const KVBlock<Number>& values(const KVBlock<Number>& block, Stream&) { return block; }
    void scale_scores(float*, int64_t, int64_t) const {}
    HEADRACE_INLINE F weight(F weight, int64_t) const { return weight; }

    // The next block's values, to be fetched while this one is reduced.
    void add_values(const typename KVBlock<Number>::Span& span, Stream& stream) const {
        const int64_t first = span.offset / T::kPerWord, words = (span.count + T::kPerWord - 1) / T::kPerWord;
        stream.add(span.values + first * heads_.head_size * T::kPerWord, words * heads_.head_size * 4);
    }

  private:
    const HeadShape& heads_;
};

template <class T> class Expanded {
    using Element = typename T::Element;
    static constexpr int64_t kPerWord = T::kPerWord;

  public:
    using Number = uint8_t;
    static constexpr bool kFetches = true; // the next block, while this one is expanded

    // `memory` begins with a cache line and has expanded_floats(heads).
    Expanded(const HeadShape& heads, float* memory)
        : heads_(heads), key_scales_(memory), value_scales_(memory + kBlockTokens),
          elements_(reinterpret_cast<Element*>(memory + 2 * kBlockTokens)) {}

    int64_t page_tokens() const { return kBlockTokens; }
    // Those of one row for whole vectors of tokens.
    void scale_scores(float* scores, int64_t first, int64_t end) const {
        for (int64_t token = first; token < end; token += W) {
            store(scores + token, mul(load(scores + token), load(key_scales_ + token)));
        }
    }
    HEADRACE_INLINE F weight(F weight, int64_t token) const { return mul(weight, load(value_scales_ + token)); }

    const KVBlock<Element>& keys(const KVBlock<Number>& block, Stream& stream) {
        const int64_t words = heads_.head_size / kPerWord, stride = heads_.page_tokens * kPerWord;
        with_numbers(heads_.numbers, [&](auto kind) {
            for (int32_t s = 0; s < block.spans_used; s++) {
                const auto& span = block.spans[s];
                for (int64_t token = 0; token < span.count; token += W) {
                    const Number* from = span.keys + (span.offset + token) * kPerWord;
                    Element* to = elements_ + (span.token + token) * kPerWord;
                    for (int64_t word = 0; word < words; word++) {
                        expand_vector<T, decltype(kind)>(from + word * stride, to + word * kBlockTokens * kPerWord);
                    }
                    stream.fetch_bytes(words * W * kPerWord);
                }
                copy_scales(span.keys, span, key_scales_);
                copy_scales(span.values, span, value_scales_);
            }
        });
        // What stands behind the last token may be no number.
        std::fill(value_scales_ + block.end, value_scales_ + (block.end + W - 1) / W * W, 0.0f);
        seen_.spans[0] = {elements_, elements_, block.first, block.first, block.end - block.first};
        seen_.spans_used = 1;
        seen_.first = block.first;
        seen_.end = block.end;
        return seen_;
    }

    // After `keys` of the same block, whose scales it has taken.
    const KVBlock<Element>& values(const KVBlock<Number>& block, Stream& stream) {
        const int64_t size = heads_.head_size;
        with_numbers(heads_.numbers, [&](auto kind) {
            for (int32_t s = 0; s < block.spans_used; s++) {
                const auto& span = block.spans[s];
                const int64_t numbers = (span.count + kPerWord - 1) / kPerWord * kPerWord * size;
                expand<T, decltype(kind)>(span.values + span.offset * size, numbers, elements_ + span.token * size);
                stream.fetch_bytes(numbers);
            }
        });
        return seen_;
    }

    void add_values(const typename KVBlock<Number>::Span& span, Stream& stream) const {
        stream.add(span.values, heads_.head_bytes());
    }

  private:
    // Whole vectors of the scales that stand behind a head's numbers.
    void copy_scales(const Number* head, const typename KVBlock<Number>::Span& span, float* scales) const {
        const Number* from = head + heads_.head_elements() + span.offset * int64_t(sizeof(float));
        std::memcpy(scales + span.token, from, size_t((span.count + W - 1) / W * W) * sizeof(float));
    }

    const HeadShape& heads_;
    float* key_scales_;   // [kBlockTokens]
    float* value_scales_; // [kBlockTokens]
    // Keys [head_size / kPerWord][kBlockTokens][kPerWord], or values [kBlockTokens / kPerWord][head_size][kPerWord].
    Element* elements_;
    KVBlock<Element> seen_;
};

} // namespace headrace::HEADRACE_ISA
