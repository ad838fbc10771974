// The standard library's sorting, compiled for the baseline: see base.h.
#include "sampling_types.h"

#include <functional>

namespace headrace {

int64_t sort_first(Candidate* candidates, int64_t count, int64_t wanted) {
    if (count > wanted) {
        std::nth_element(candidates, candidates + wanted, candidates + count);
        count = wanted;
    }
    std::sort(candidates, candidates + count);
    return count;
}

float greatest_of_rank(float* values, int64_t count, int64_t rank) {
    std::nth_element(values, values + rank - 1, values + count, std::greater<float>());
    return values[rank - 1];
}

} // namespace headrace
