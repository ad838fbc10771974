// A fixed group of threads that run one function together, meet at barriers and share work by the piece.
#pragma once

#include "base.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

// A number that threads wait to see change. A waiter spins, then yields its core, then sleeps: work that is handed over
// within microseconds costs no system call, and an idle team costs nothing.
class Gate {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }
    void wait_past(uint32_t old);
    void advance();

  private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
};

struct Range {
    int64_t begin, end;
    explicit operator bool() const { return begin < end; }
};

// The thread that calls `run` is worker 0; size - 1 threads of the team are the others.
//
// Work is claimed, not dealt: each worker takes the pieces of its own segment, and then what is left of the others', so
// that a worker whose core the system has lent to somebody else delays only what it holds. Where a worker begins is known
// beforehand. The counters return to 0 at the start of a run and at each barrier, by the last worker to arrive. So a phase
// of a computation is
//
//     while (Range mine = team.claim(worker, pieces)) ...;
//     team.barrier();
//
// with one claimed operation between two barriers.
class Team {
  public:
    // Throws what std::thread or memory does; the threads that were started have ended by then.
    explicit Team(int size);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Calls body(worker) once on each worker, and returns when all have returned. One run at a time: a second caller waits.
    template <class Body> void run(const Body& body) {
        run_erased([](const void* erased, int worker) { (*static_cast<const Body*>(erased))(worker); }, &body);
    }

    // Every worker of the current run waits here for all others.
    void barrier();

    // The first piece of a worker's own segment of 0..total.
    int64_t segment(int worker, int64_t total) const { return total * worker / size_; }

    // The next piece or pieces of 0..total. Shares shrink as the rest does: large ones first for long streams through
    // memory, small ones last so that all workers end together.
    Range claim(int worker, int64_t total);

    // The next single piece of 0..total, or a number from `total` on: for pieces that stand in order, the costliest first.
    int64_t claim_one() { return claimed_[0].count.fetch_add(1, std::memory_order_relaxed); }

  private:
    using Erased = void (*)(const void* body, int worker);
    void run_erased(Erased call, const void* body);
    void work(int worker);
    void leave();
    void unclaim();

    // How much of a segment is claimed.
    struct alignas(64) Claimed {
        std::atomic<int64_t> count{0};
    };

    const int size_;
    std::mutex one_run_;
    Erased call_ = nullptr;
    const void* body_ = nullptr;
    bool leaving_ = false;
    Gate start_;
    Gate meeting_;
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<Claimed> claimed_;
    std::vector<std::thread> threads_;
};

} // namespace headrace
