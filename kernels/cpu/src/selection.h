// The head of a row's order, without sorting the row.
//
// The greatest value of each group of kGroup neighbours is noted while the row is read. The K-th greatest of those bounds
// the K-th greatest value from below, so whatever reaches it holds the first K, and only groups that reach it are looked
// at again. Where there are not enough groups for that, the bound is found by counting what reaches a guess.
#pragma once

#include "element.h"
#include "sampling_types.h"

namespace headrace::HEADRACE_ISA {

// Calls body(lane, value) for each lane of the group at `first` whose value is at least the bound; never for a NaN.
template <class Body>
HEADRACE_INLINE void for_reaching(const float* values, int64_t first, int64_t end, float bound, Body body) {
    int64_t i = first;
    for (; i + W <= end; i += W) {
        for (uint32_t lanes = lanes_at_least(load(values + i), set1(bound)); lanes; lanes &= lanes - 1) {
            body(i + __builtin_ctz(lanes));
        }
    }
    for (; i < end; i++) {
        if (values[i] >= bound) body(i);
    }
}

// [count] -> the greatest of each group, and of all; a NaN counts for nothing.
inline float group_maxima(const float* values, int64_t count, float* maxima) {
    float greatest = -std::numeric_limits<float>::infinity();
    for (int64_t first = 0; first < count; first += kGroup) {
        F most = set1(-std::numeric_limits<float>::infinity());
        int64_t i = first, end = std::min(count, first + kGroup);
        for (; i + W <= end; i += W) most = max(load(values + i), most);
        float maximum = reduce_max(most);
        for (; i < end; i++) maximum = std::max(maximum, values[i]);
        maxima[first / kGroup] = maximum;
        greatest = std::max(greatest, maximum);
    }
    return greatest;
}

// A row's values with the maxima of their groups.
class Selection {
  public:
    Selection(const float* values, int64_t count, float greatest, SamplingScratch& scratch)
        : values_(values), count_(count), groups_((count + kGroup - 1) / kGroup), greatest_(greatest),
          scratch_(scratch) {}

    // The first `wanted` of the order, in scratch.candidates, and how many there are: fewer only if the row has no more.
    int64_t first(int64_t wanted) {
        wanted = std::min(wanted, count_);
        Candidate* found = scratch_.candidates;
        const float bound = bound_of(wanted);
        for_groups(bound, [&](int64_t first, int64_t end) {
            for_reaching(values_, first, end, bound, [&](int64_t i) { *found++ = {values_[i], int32_t(i)}; });
        });
        Candidate* begin = scratch_.candidates;
        return sort_first(begin, found - begin, wanted);
    }

  private:
    template <class Body> HEADRACE_INLINE void for_groups(float bound, Body body) const {
        for (int64_t group = 0; group < groups_; group++) {
            if (scratch_.maxima[group] >= bound) body(group * kGroup, std::min(count_, (group + 1) * kGroup));
        }
    }

    // A value that at least `wanted` values reach, and not many more.
    float bound_of(int64_t wanted) {
        if (wanted >= count_) return -std::numeric_limits<float>::infinity();
        if (wanted <= groups_ / 2) {
            std::copy_n(scratch_.maxima, groups_, scratch_.ranked);
            return greatest_of_rank(scratch_.ranked, groups_, wanted);
        }
        float near = 0, far = 1; // distances from the greatest: too few values within the first, enough within the other
        while (count_reaching(greatest_ - far) < wanted) {
            near = far;
            far *= 2;
            if (far > 1e30f) return -std::numeric_limits<float>::infinity();
        }
        for (int halvings = 0; halvings < 20 && count_reaching(greatest_ - far) > 2 * wanted; halvings++) {
            float middle = (near + far) / 2;
            (count_reaching(greatest_ - middle) < wanted ? near : far) = middle;
        }
        return greatest_ - far;
    }

    int64_t count_reaching(float bound) const {
        int64_t reaching = 0;
        for_groups(bound, [&](int64_t first, int64_t end) {
            int64_t i = first;
            for (; i + W <= end; i += W) reaching += __builtin_popcount(lanes_at_least(load(values_ + i), set1(bound)));
            for (; i < end; i++) reaching += values_[i] >= bound;
        });
        return reaching;
    }

    const float* values_;
    int64_t count_;
    int64_t groups_;
    float greatest_;
    SamplingScratch& scratch_;
};

} // namespace headrace::HEADRACE_ISA
