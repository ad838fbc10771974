// A long context thinned: each head keeps the first tokens, the last ones, and between them those whose keys are least
// like all others.
//
// A key's score is minus the cosine of the angle between it and the mean of all keys at length 1 (Park et al., "KeyDiff",
// 2025). It needs no attention weights, and depends on nothing but the request's own keys. Every head keeps as many tokens,
// though not the same ones, so that they all fit the request's first pages.
#pragma once

#include "attention_types.h"
#include "team.h"

namespace headrace {

// One request's context, and how much of it is to be left. The middle is what lies between `first` and `last` tokens.
struct ThinWork {
    int64_t layers;
    int64_t layer_bytes;
    const int64_t* page_offset; // [pages of `tokens`] bytes from the arena's start
    int64_t tokens;
    int64_t kept;  // of them
    int64_t first; // of those, from the start of the context
    int64_t last;  // of those, up to its end
};

// Every worker of the team calls it; `arena` is where page offsets count from.
void thin(Team& team, const HeadShape& heads, const ThinWork& work, uint8_t* arena);

} // namespace headrace
