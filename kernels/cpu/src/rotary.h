// From one layer's qkv projection to turned queries and to keys and values in their pages.
#pragma once

#include "kv_numbers.h"
#include "norm.h"

namespace headrace::HEADRACE_ISA {

// Components i and i + size/2 are a point in the plane, turned by the angle of the row's position (as in GPT-NeoX).
HEADRACE_INLINE void turn(const float* x, const float* cos_sin, int64_t half, float* out) {
    for_vectors(half, [&](int64_t i, int n) {
        F first = F32::read(x + i, n), second = F32::read(x + half + i, n);
        F cosine = F32::read(cos_sin + i, n), sine = F32::read(cos_sin + half + i, n);
        F32::write(out + i, sub(mul(first, cosine), mul(second, sine)), n);
        F32::write(out + half + i, add(mul(second, cosine), mul(first, sine)), n);
    });
}

// Rows of the step, one by one. In is the type of qkv, T that of queries, and of keys and values unless they have scales.
template <class In, class T> class Rotary {
    using Element = typename T::Element;

  public:
    Rotary(const StepShape& step, const HeadShape& heads, const RotaryLayer& layer)
        : step_(step), heads_(heads), layer_(layer) {}

    void rows(int64_t begin, int64_t end) {
        const int32_t* starts = step_.query_start;
        int64_t request = 0;
        for (int64_t row = begin; row < end; row++) {
            while (row >= starts[request + 1]) request++;
            const int64_t slot = step_.context_len[request] - (starts[request + 1] - row);
            int64_t page = step_.page_offset[request * step_.pages_per_request + slot / heads_.page_tokens];
            write_row(row, slot % heads_.page_tokens, layer_.kv + page);
        }
    }

  private:
    // `token` is the row's place on its page.
    void write_row(int64_t row, int64_t token, uint8_t* block) {
        const int64_t size = heads_.head_size, head_bytes = heads_.head_bytes();
        const float* cos_sin = layer_.cos_sin + step_.positions[row] * size;
        alignas(64) float turned[kMostHeadSize];
        for (int64_t head = 0; head < heads_.heads; head++) {
            read_head(row, head, layer_.q_norm);
            turn(head_, cos_sin, size / 2, turned);
            round(turned, static_cast<Element*>(layer_.q) + row * layer_.q_stride + head * size);
        }
        for (int64_t head = 0; head < heads_.kv_heads; head++) {
            uint8_t* keys = block + head * head_bytes;
            read_head(row, heads_.heads + head, layer_.k_norm);
            turn(head_, cos_sin, size / 2, turned);
            keep(turned, keys, token, [&](const auto* key, auto* to) { write_key(key, to, token); });
            read_head(row, heads_.heads + heads_.kv_heads + head, nullptr);
            keep(head_, keys + heads_.kv_heads * head_bytes, token,
                 [&](const auto* value, auto* to) { write_value(value, to, token); });
        }
    }

    // One head of the projection into head_: with its bias, normalised if there is a weight for that.
    void read_head(int64_t row, int64_t head, const float* norm) {
        const int64_t size = heads_.head_size;
        const auto* from =
            static_cast<const typename In::Element*>(layer_.qkv) + row * layer_.qkv_stride + head * size;
        if (layer_.bias) {
            const float* bias = layer_.bias + head * size;
            for_vectors(size, [&](int64_t i, int n) {
                F32::write(head_ + i, add(In::read(from + i, n), F32::read(bias + i, n)), n);
            });
        } else {
            for_vectors(size, [&](int64_t i, int n) { F32::write(head_ + i, In::read(from + i, n), n); });
        }
        if (norm) rms_norm_row<F32>(head_, norm, layer_.norm_eps, size, head_);
    }

    void round(const float* from, Element* to) const {
        for_vectors(heads_.head_size, [&](int64_t i, int n) { T::write(to + i, F32::read(from + i, n), n); });
    }

    // Calls write(key or value as it is kept, the head's own on the page); a scale goes behind those.
    template <class Write> void keep(const float* x, uint8_t* head, int64_t token, const Write& write) const {
        if (!heads_.has_scales()) {
            alignas(64) Element stored[kMostHeadSize];
            round(x, stored);
            return write(stored, reinterpret_cast<Element*>(head));
        }
        alignas(64) uint8_t numbers[kMostHeadSize];
        float scale = 0;
        with_numbers(heads_.numbers, [&](auto kind) { scale = to_numbers<decltype(kind)>(x, heads_.head_size, numbers); });
        std::memcpy(head + heads_.head_elements() + token * int64_t(sizeof scale), &scale, sizeof scale);
        write(numbers, head);
    }

    // A key's words go to the place of its token in each group of tokens.
    template <class Number> void write_key(const Number* key, Number* keys, int64_t token) const {
        constexpr int64_t n = T::kPerWord;
        for (int64_t word = 0; word < heads_.head_size / n; word++) {
            std::memcpy(keys + (word * heads_.page_tokens + token) * n, key + word * n, n * sizeof(Number));
        }
    }

    // A value's elements go to its token's side of each word.
    template <class Number> void write_value(const Number* value, Number* values, int64_t token) const {
        constexpr int64_t n = T::kPerWord;
        Number* to = values + token / n * heads_.head_size * n + token % n;
        for (int64_t i = 0; i < heads_.head_size; i++) to[i * n] = value[i];
    }

    const StepShape& step_;
    const HeadShape& heads_;
    const RotaryLayer& layer_;
    alignas(64) float head_[kMostHeadSize];
};

inline void rotary_kv_write(const StepShape& step, const HeadShape& heads, const RotaryLayer& layer, int64_t begin,
                            int64_t end) {
    with_element(layer.qkv_is_float, [&](auto in) {
        with_element(heads.is_float, [&](auto type) {
            Rotary<decltype(in), decltype(type)>(step, heads, layer).rows(begin, end);
        });
    });
}

} // namespace headrace::HEADRACE_ISA
