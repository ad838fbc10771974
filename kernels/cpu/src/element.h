// The types that activations, keys and values are stored in.
#pragma once

namespace headrace::HEADRACE_ISA {

// bf16, multiplied in pairs of neighbours.
struct Bf16 {
    using Element = uint16_t;
    using Words = Pairs; // W words of kPerWord elements
    static constexpr int kPerWord = 2;

    static HEADRACE_INLINE F read(const Element* p, int n) { return n == W ? load_bf16(p) : load_bf16_n(p, n); }
    static HEADRACE_INLINE void write(Element* p, F a, int n) { n == W ? store_bf16(p, a) : store_bf16_n(p, a, n); }
    static HEADRACE_INLINE Words read_words(const Element* p, int n) {
        return n == W ? load_pairs(p) : load_pairs_n(p, n);
    }
    static HEADRACE_INLINE Words broadcast_word(const Element* p) { return broadcast_pair(p); }
    // Each word's first element, and 0 in place of its second.
    static HEADRACE_INLINE Words first_elements(Words a) { return first_of_pairs(a); }
    static HEADRACE_INLINE F dot(F sum, Words a, Words b) { return dot_bf16(sum, a, b); }
};

struct F32 {
    using Element = float;
    using Words = F;
    static constexpr int kPerWord = 1;

    static HEADRACE_INLINE F read(const Element* p, int n) { return n == W ? load(p) : load_n(p, n); }
    static HEADRACE_INLINE void write(Element* p, F a, int n) { n == W ? store(p, a) : store_n(p, a, n); }
    static HEADRACE_INLINE Words read_words(const Element* p, int n) { return read(p, n); }
    static HEADRACE_INLINE Words broadcast_word(const Element* p) { return set1(*p); }
    static HEADRACE_INLINE Words first_elements(Words a) { return a; }
    static HEADRACE_INLINE F dot(F sum, Words a, Words b) { return fma(a, b, sum); }
};

// A row as it is, as a source of vectors.
template <class T> class Plain {
  public:
    explicit Plain(const typename T::Element* x) : x_(x) {}
    HEADRACE_INLINE F read(int64_t i, int n) const { return T::read(x_ + i, n); }

  private:
    const typename T::Element* x_;
};

// Calls body with an object of the type that a buffer has.
template <class Body> HEADRACE_INLINE void with_element(bool is_float, Body body) {
    is_float ? body(F32()) : body(Bf16());
}

// Calls body(first, lanes) for each vector of `count` elements. Only the last may have fewer than W lanes; for the others
// `lanes` is the constant W, which `read` and `write` resolve when they are compiled.
template <class Body> HEADRACE_INLINE void for_vectors(int64_t count, Body body) {
    int64_t i = 0;
    for (; i + W <= count; i += W) body(i, W);
    if (i < count) body(i, int(count - i));
}

} // namespace headrace::HEADRACE_ISA
