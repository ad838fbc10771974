// Rows of the embedding table, as float32.
#pragma once

#include "element.h"

namespace headrace::HEADRACE_ISA {

// [vocabulary, size] of float32 or bf16, [rows] -> [rows, size].
inline void embed(const void* table, bool is_float, const int32_t* ids, int64_t rows, int64_t size, float* out) {
    with_element(is_float, [&](auto type) {
        using T = decltype(type);
        for (int64_t row = 0; row < rows; row++) {
            const auto* from = static_cast<const typename T::Element*>(table) + ids[row] * size;
            for_vectors(size, [&](int64_t i, int n) { F32::write(out + row * size + i, T::read(from + i, n), n); });
        }
    });
}

} // namespace headrace::HEADRACE_ISA
