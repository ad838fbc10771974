// Memory that is fetched while something else is computed.
#pragma once

#include "attention_plan.h"
#include "base.h"

namespace headrace::HEADRACE_ISA {

// Parts of memory that are fetched a few lines at a time.
class Stream {
  public:
    static constexpr int kMostParts = 2 * kBlockTokens / kPageTokens; // keys and values of each page of a block

    void clear() {
        parts_ = taken_ = 0;
        at_ = end_ = nullptr;
    }

    void add(const void* part, int64_t bytes) { part_[parts_++] = {static_cast<const char*>(part), bytes}; }

    // The next lines, as many as `vectors` vectors take.
    HEADRACE_INLINE void fetch(int vectors) {
        if (at_ >= end_ && !begin_part()) return;
        const int bytes = std::max(kLine, vectors * W * 4);
        HEADRACE_UNROLL
        for (int i = 0; i < bytes; i += kLine) prefetch(at_ + i);
        at_ += bytes;
    }

    // The next lines, as many as so many bytes take.
    void fetch_bytes(int64_t bytes) {
        for (; bytes > 0; bytes -= kLine, at_ += kLine) {
            if (at_ >= end_ && !begin_part()) return;
            prefetch(at_);
        }
    }

  private:
    static constexpr int kLine = 64;

    bool begin_part() {
        if (taken_ == parts_) return false;
        at_ = part_[taken_].at;
        end_ = at_ + part_[taken_++].bytes;
        return true;
    }

    struct Part {
        const char* at;
        int64_t bytes;
    };
    const char* at_ = nullptr;
    const char* end_ = nullptr;
    int parts_ = 0;
    int taken_ = 0;
    Part part_[kMostParts];
};

} // namespace headrace::HEADRACE_ISA
