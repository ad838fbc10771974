// Pages from one place to another: within the arena, to host memory, and back.
#pragma once

#include "base.h"

namespace headrace {

struct PageMove {
    void* to;
    const void* from;
};

// Bytes that one worker copies at once.
constexpr int64_t kCopyBytes = 256 * 1024;

// Part `part` of the moves of pages of `page_bytes`, each of which has parts_of(page_bytes); no page overlaps another.
constexpr int64_t parts_of(int64_t page_bytes) { return (page_bytes + kCopyBytes - 1) / kCopyBytes; }

inline void copy_part(const PageMove* moves, int64_t page_bytes, int64_t part) {
    const PageMove& move = moves[part / parts_of(page_bytes)];
    const int64_t begin = part % parts_of(page_bytes) * kCopyBytes;
    std::memcpy(static_cast<char*>(move.to) + begin, static_cast<const char*>(move.from) + begin,
                size_t(std::min(kCopyBytes, page_bytes - begin)));
}

} // namespace headrace
