#include "team.h"

#include <sched.h>

namespace headrace {
namespace {

constexpr int kSpins = 2000;  // some 20 to 50 microseconds
constexpr int kYields = 400;  // a few hundred microseconds on an idle core: longer than the gap between two steps

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace

void Gate::wait_past(uint32_t old) {
    for (int i = 0; i < kSpins; i++) {
        if (value() != old) return;
        pause();
    }
    for (int i = 0; i < kYields; i++) {
        if (value() != old) return;
        sched_yield();
    }
    // `sleepers_` rises before `value_` is read, and `advance` writes `value_` before it reads `sleepers_`: in the one
    // order of all four, either the waiter sees the new value or the other side sees the sleeper.
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != old; });
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Gate::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
    }
}

Team::Team(int size) : size_(std::max(1, size)), claimed_(size_t(size_)) {
    try {
        for (int worker = 1; worker < size_; worker++) threads_.emplace_back([this, worker] { work(worker); });
    } catch (...) {
        leave();
        throw;
    }
}

Team::~Team() { leave(); }

void Team::leave() {
    leaving_ = true;
    start_.advance();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run_erased(Erased call, const void* body) {
    std::lock_guard<std::mutex> lock(one_run_);
    call_ = call;
    body_ = body;
    unclaim();
    start_.advance();
    call(body, 0);
    barrier();
}

void Team::work(int worker) {
    for (uint32_t seen = 0;; seen++) {
        start_.wait_past(seen);
        if (leaving_) return;
        call_(body_, worker);
        barrier();
    }
}

void Team::barrier() {
    if (size_ == 1) {
        unclaim();
        return;
    }
    uint32_t meeting = meeting_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        unclaim();
        meeting_.advance();
    } else {
        meeting_.wait_past(meeting);
    }
}

void Team::unclaim() {
    for (Claimed& claimed : claimed_) claimed.count.store(0, std::memory_order_relaxed);
}

Range Team::claim(int worker, int64_t total) {
    for (int other = worker; other < worker + size_; other++) {
        const int owner = other % size_;
        const int64_t begin = segment(owner, total), size = segment(owner + 1, total) - begin;
        std::atomic<int64_t>& claimed = claimed_[size_t(owner)].count;
        int64_t done = claimed.load(std::memory_order_relaxed);
        while (done < size) {
            const int64_t share = size_ == 1 ? size : std::max<int64_t>(1, (size - done) / 2);
            if (claimed.compare_exchange_weak(done, done + share, std::memory_order_relaxed)) {
                return {begin + done, begin + done + share};
            }
        }
    }
    return {total, total};
}

} // namespace headrace
