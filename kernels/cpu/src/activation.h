// The gated activations of the feed-forward layer: silu(gate) * up.
#pragma once

#include "element.h"
#include "exponential.h"

namespace headrace::HEADRACE_ISA {

// [rows, 2 * size] -> [rows, size], of float32 or bf16; the first half of a row is the gate.
inline void silu_and_mul(const void* gate_up, int64_t rows, int64_t size, void* out, bool is_float) {
    with_element(is_float, [&](auto type) {
        using T = decltype(type);
        for (int64_t row = 0; row < rows; row++) {
            const auto* gate = static_cast<const typename T::Element*>(gate_up) + row * 2 * size;
            auto* to = static_cast<typename T::Element*>(out) + row * size;
            for_vectors(size, [&](int64_t i, int n) {
                T::write(to + i, mul(silu(T::read(gate + i, n)), T::read(gate + size + i, n)), n);
            });
        }
    });
}

} // namespace headrace::HEADRACE_ISA
