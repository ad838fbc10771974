// What a linear operation called alone is given.
#pragma once

#include "weights.h"

namespace headrace {

// The largest logit of a row and where it is; of equal ones the first.
struct Best {
    float value;
    int32_t index;
    static constexpr Best none() { return {-std::numeric_limits<float>::infinity(), 0}; }
    void take(float other, int32_t at) {
        if (other > value || (other == value && at < index)) *this = {other, at};
    }
};

enum class Then : int32_t {
    kStoreFloat = 0,
    kStoreBf16 = 1,
    kAddFloat = 2,
    kSiluMultiplyFloat = 3,
    kSiluMultiplyBf16 = 4,
    kBest = 5, // `to` is an array of Best, one for each row; without a bias
};

struct LinearJob {
    Weights weights;
    Activations x;
    int64_t rows;
    Then then;
    int32_t reserved;
    void* to;
    int64_t to_stride;  // in elements
    int64_t columns;    // of the result, where it is narrower than the weights: SiluMultiply
    const float* bias;  // or null
};

static_assert(sizeof(Weights) == 32 && sizeof(Activations) == 32 && sizeof(LinearJob) == 112);

} // namespace headrace
