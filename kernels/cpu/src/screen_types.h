// A screen: the head again in 8 bits, with what its products can be off by. See screen.h.
#pragma once

#include "team.h"
#include "weights.h"

namespace headrace {

struct Screen {
    Weights weights;     // int8; null bytes: there is no screen
    const float* errors; // [tiles * 32] of each output |w - w8|, and what rounding may add, for one unit of |x|
    const float* norms;  // [tiles * 32] of each output |w8|, for one unit of |x - x8|
};

// The errors and norms of `screen`, the rows of `exact` in 8 bits.
void measure_screen(Team& team, const Weights& exact, const Weights& screen, float* errors, float* norms);

} // namespace headrace
