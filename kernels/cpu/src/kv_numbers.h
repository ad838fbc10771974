// Keys and values as numbers of one byte: those of a token's head share a scale. kernels/quantised.py says the same in torch.
#pragma once

#include "attention_types.h"
#include "element.h"
#include "half.h"

namespace headrace::HEADRACE_ISA {

struct Int8 {
    static constexpr float kGreatest = 127;
    static HEADRACE_INLINE F read(const uint8_t* p) { return load_s8(p); }
    // A half is rounded up.
    static HEADRACE_INLINE void write(uint8_t* p, F a) {
        store_s8(reinterpret_cast<int8_t*>(p), floor(add(a, set1(0.5f))));
    }
};

struct E4m3 {
    static constexpr float kGreatest = 448;
    static HEADRACE_INLINE F read(const uint8_t* p) { return load_e4m3(p); }
    static HEADRACE_INLINE void write(uint8_t* p, F a) {
        float lanes[W];
        store(lanes, a);
        HEADRACE_UNROLL
        for (int i = 0; i < W; i++) p[i] = narrow_e4m3(lanes[i]);
    }
};

// Calls body with an object of the kind of numbers that have a scale.
template <class Body> HEADRACE_INLINE void with_numbers(Numbers numbers, Body body) {
    numbers == Numbers::kInt8 ? body(Int8()) : body(E4m3());
}

// A head's floats as numbers, in memory that ends with a whole vector; returns their scale. If one of them is infinite or
// no number, neither is the scale one, and the numbers are zeros.
template <class Kind> inline float to_numbers(const float* from, int64_t size, uint8_t* to) {
    F greatest = zero(), doubt = zero(); // 0 * x is 0, unless x is infinite or no number
    for_vectors(size, [&](int64_t i, int n) {
        F x = F32::read(from + i, n);
        greatest = max(greatest, abs(x));
        doubt = fma(x, zero(), doubt);
    });
    const float scale = reduce_max(greatest) / Kind::kGreatest + reduce_add(doubt);
    if (scale != scale) {
        std::memset(to, 0, size_t(size));
        return scale;
    }
    const F divisor = set1(scale > 0 ? scale : 1.0f);
    for_vectors(size, [&](int64_t i, int n) { Kind::write(to + i, div(F32::read(from + i, n), divisor)); });
    return scale;
}

// One vector of T's words from as many numbers.
template <class T, class Kind> HEADRACE_INLINE void expand_vector(const uint8_t* from, typename T::Element* to) {
    if constexpr (T::kPerWord == 2) {
        store_pairs(to, pairs_of(Kind::read(from), Kind::read(from + W)));
    } else {
        store(to, Kind::read(from));
    }
}

// `count` numbers that stand one behind the other, as T.
template <class T, class Kind> inline void expand(const uint8_t* from, int64_t count, typename T::Element* to) {
    constexpr int64_t step = W * T::kPerWord;
    int64_t i = 0;
    for (; i + step <= count; i += step) expand_vector<T, Kind>(from + i, to + i);
    if (i == count) return;
    uint8_t numbers[step] = {};
    typename T::Element elements[step];
    std::memcpy(numbers, from + i, size_t(count - i));
    expand_vector<T, Kind>(numbers, elements);
    std::memcpy(to + i, elements, size_t(count - i) * sizeof elements[0]);
}

} // namespace headrace::HEADRACE_ISA
