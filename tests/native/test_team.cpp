#include "team.h"
#include "check.h"

#include <chrono>
#include <vector>

using headrace::Range;
using headrace::Team;

// Each piece of each phase is claimed by exactly one worker, and a phase sees all of the one before it.
static void claims_and_barriers(int size) {
    constexpr int64_t kPieces = 101;
    constexpr int kPhases = 50;
    Team team(size);
    std::vector<int> done(kPieces);
    for (int repeat = 0; repeat < 3; repeat++) {
        std::fill(done.begin(), done.end(), 0);
        team.run([&](int worker) {
            CHECK(worker >= 0 && worker < size);
            for (int phase = 0; phase < kPhases; phase++) {
                while (Range mine = team.claim(worker, kPieces))
                    for (int64_t i = mine.begin; i < mine.end; i++) done[i]++;
                team.barrier();
                for (int count : done) CHECK(count == phase + 1);
                team.barrier();
            }
        });
    }
}

// Waits long enough for the workers to fall asleep, in a barrier and between runs.
static void sleepers_wake(int size) {
    Team team(size);
    for (int repeat = 0; repeat < 2; repeat++) {
        std::atomic<int> passed{0};
        team.run([&](int worker) {
            if (worker == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
            team.barrier();
            passed++;
        });
        CHECK(passed == size);
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
}

// Two threads that run on one team take turns.
static void callers_take_turns() {
    Team team(2);
    int runs = 0;
    auto caller = [&] {
        for (int i = 0; i < 200; i++)
            team.run([&](int worker) {
                if (worker == 0) runs++;
            });
    };
    std::thread other(caller);
    caller();
    other.join();
    CHECK(runs == 400);
}

void test_team() {
    for (int size = 1; size <= 4; size++) {
        claims_and_barriers(size);
        sleepers_wake(size);
    }
    callers_take_turns();
}
