// Memory that is wanted soon, fetched by products meanwhile.
//
// Products of many rows are bound by arithmetic and leave memory idle; attention is bound by memory. So while products
// run, each call of their micro-kernel fetches strips of the keys and values that the next attention reads, a few lines
// with each of its steps. What no longer fits in the L2 cache by then has gone to the L3, where it doesn't last: others use
// that too. So fetching begins late, two products before that attention.
#pragma once

#include "base.h"

namespace headrace {

constexpr int64_t kLineBytes = 64;

// A part of memory.
struct Strip {
    const uint8_t* begin;
    int64_t bytes;
};

class Ahead {
  public:
    // Nothing.
    Ahead() = default;
    // One worker's share of `count` runs of `bytes` each, at `offsets` from a base; nothing until it is started.
    Ahead(const int64_t* offsets, int64_t count, int64_t bytes, int worker, int workers)
        : offsets_(offsets), count_(count), bytes_(bytes), worker_(worker), workers_(workers), next_(count) {}

    // Begins with the first run, on this base.
    void start(const uint8_t* base) {
        base_ = base;
        next_ = worker_;
        at_ = end_ = 0;
    }

    // What has not been fetched by now is left.
    void stop() {
        next_ = count_;
        at_ = end_;
    }

    // The next strip, of `most` bytes at most.
    Strip take(int64_t most) {
        if (at_ == end_) {
            if (next_ >= count_) return {base_, 0};
            at_ = offsets_[next_];
            end_ = at_ + bytes_;
            next_ += workers_;
        }
        const Strip strip{base_ + at_, std::min(end_ - at_, most)};
        at_ += strip.bytes;
        return strip;
    }

  private:
    const int64_t* offsets_ = nullptr;
    int64_t count_ = 0, bytes_ = 0;
    int worker_ = 0, workers_ = 1;
    const uint8_t* base_ = nullptr;
    int64_t next_ = 0, at_ = 0, end_ = 0;
};

// The beginning of what a worker multiplies next, fetched before it comes to a barrier. Products of few rows are bound by
// memory, which is idle between them.
class Lead {
  public:
    void aim(const uint8_t* begin, const uint8_t* end) {
        at_ = begin;
        end_ = end;
    }

    // The next lines of it.
    void fetch() {
        const uint8_t* stop = at_ + std::min<int64_t>(kBytes, end_ - at_);
        for (; at_ < stop; at_ += kLineBytes) prefetch(at_);
    }

  private:
    static constexpr int64_t kBytes = 16 * 1024;
    const uint8_t* at_ = nullptr;
    const uint8_t* end_ = nullptr;
};

} // namespace headrace
