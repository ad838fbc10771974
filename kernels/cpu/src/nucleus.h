// A place in a row's order by the weight of what stands before it, however far behind the head, without sorting the row.
//
// The weight of all values that reach a bound takes one pass over them. Halving the distance between a bound that is too
// high and one that is low enough leaves a window of few candidates, and only these are sorted.
#pragma once

#include "exponential.h"
#include "element.h"
#include "sampling_types.h"

namespace headrace::HEADRACE_ISA {

class Nucleus {
  public:
    // Of [count] scaled logits, the greatest of which is 0; scratch.maxima are those of their groups.
    Nucleus(const float* scaled, int64_t count, SamplingScratch& scratch)
        : scaled_(scaled), count_(count), scratch_(scratch) {}

    struct Place {
        Candidate candidate;
        double through; // the weight of all up to and with it
    };

    // Weight of all values that are at least `bound`.
    double weight_of(float bound) const { return reaching(bound).weight; }

    // The first place whose `through` is at least the target, or greater if `past`: of the values from `least` on, the
    // last of which it is where rounding leaves none.
    Place find(double target, bool past, float least) {
        auto reaches = [&](double weight) { return past ? weight > target : weight >= target; };
        // The values from `high` on weigh too little, those from `low` on enough.
        float high = 1, low = std::max(-1.0f, least);
        Reaching above{0, 0}, below = reaching(low);
        while (low > least && !reaches(below.weight)) {
            high = low;
            above = below;
            low = low < -1e30f ? least : std::max(2 * low, least);
            below = reaching(low);
        }
        while (below.count - above.count > kWindow) {
            const float middle = low / 2 + high / 2;
            if (middle <= low || middle >= high) break;
            const Reaching between = reaching(middle);
            const bool enough = reaches(between.weight);
            (enough ? low : high) = middle;
            (enough ? below : above) = between;
        }
        return walk(low, high, above.weight, reaches);
    }

  private:
    static constexpr int64_t kWindow = 256;

    struct Reaching {
        double weight;
        int64_t count;
    };

    Reaching reaching(float bound) const {
        Reaching all{0, 0};
        for (int64_t first = 0; first < count_; first += kGroup) {
            if (!(scratch_.maxima[first / kGroup] >= bound)) continue;
            const int64_t end = std::min(count_, first + kGroup);
            F sum = zero();
            int64_t i = first;
            for (; i + W <= end; i += W) {
                F value = load(scaled_ + i);
                sum = add(sum, where_at_least(value, set1(bound), exp(value)));
                all.count += __builtin_popcount(lanes_at_least(value, set1(bound)));
            }
            all.weight += reduce_add(sum);
            for (; i < end; i++) {
                if (!(scaled_[i] >= bound)) continue;
                all.weight += std::exp(double(scaled_[i]));
                all.count++;
            }
        }
        return all;
    }

    // The place among the values from `low` to below `high`, before which all others weigh `above`.
    template <class Reaches> Place walk(float low, float high, double above, const Reaches& reaches) {
        int64_t found = 0;
        for (int64_t first = 0; first < count_; first += kGroup) {
            if (!(scratch_.maxima[first / kGroup] >= low)) continue;
            for (int64_t i = first; i < std::min(count_, first + kGroup); i++) {
                if (scaled_[i] >= low && scaled_[i] < high) scratch_.candidates[found++] = {scaled_[i], int32_t(i)};
            }
        }
        sort_first(scratch_.candidates, found, found);
        Place place{{0, 0}, above};
        for (int64_t i = 0; i < found; i++) {
            place.candidate = scratch_.candidates[i];
            place.through += std::exp(double(place.candidate.value));
            if (reaches(place.through)) break;
        }
        return place;
    }

    const float* scaled_;
    int64_t count_;
    SamplingScratch& scratch_;
};

} // namespace headrace::HEADRACE_ISA
