// RMSNorm of float rows.
//
// The norm is a source of vectors rather than a pass over memory: whoever wants normalised values (the rounding to
// bf16 here, the quantiser to groups of int8, the rotary of a head) reads them through `Normalised` as it goes.
#pragma once

#include "element.h"

namespace headrace::HEADRACE_ISA {

// 1 / sqrt(mean square + eps). Four sums in a fixed pattern: the result depends on nothing but the row.
inline float inverse_rms(const float* x, int64_t count, float eps) {
    F sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * W <= count; i += 4 * W) {
        HEADRACE_UNROLL
        for (int s = 0; s < 4; s++) {
            F a = load(x + i + s * W);
            sums[s] = fma(a, a, sums[s]);
        }
    }
    for (; i < count; i += W) {
        F a = load_n(x + i, int(count - i));
        sums[0] = fma(a, a, sums[0]);
    }
    float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    return 1.0f / std::sqrt(sum / float(count) + eps);
}

// x * inverse_rms(x) * weight, W lanes at a time.
class Normalised {
  public:
    Normalised(const float* x, const float* weight, int64_t count, float eps)
        : x_(x), weight_(weight), inverse_(inverse_rms(x, count, eps)) {}

    HEADRACE_INLINE F read(int64_t i, int n) const {
        return mul(mul(F32::read(x_ + i, n), set1(inverse_)), F32::read(weight_ + i, n));
    }

  private:
    const float* x_;
    const float* weight_;
    float inverse_;
};

template <class T>
inline void rms_norm_row(const float* x, const float* weight, float eps, int64_t size, typename T::Element* out) {
    Normalised normalised(x, weight, size, eps);
    for_vectors(size, [&](int64_t i, int n) { T::write(out + i, normalised.read(i, n), n); });
}

// [rows, size] -> [rows, size] of float32 or bf16.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t size, void* out,
                     bool is_float) {
    with_element(is_float, [&](auto type) {
        using T = decltype(type);
        auto* to = static_cast<typename T::Element*>(out);
        for (int64_t row = 0; row < rows; row++) rms_norm_row<T>(x + row * size, weight, eps, size, to + row * size);
    });
}

// residual += x, of float32 or bf16.
inline void add_rows(float* residual, const void* x, bool is_float, int64_t count) {
    with_element(is_float, [&](auto type) {
        using T = decltype(type);
        const auto* from = static_cast<const typename T::Element*>(x);
        for_vectors(count, [&](int64_t i, int n) {
            F32::write(residual + i, add(F32::read(residual + i, n), T::read(from + i, n)), n);
        });
    });
}

} // namespace headrace::HEADRACE_ISA
