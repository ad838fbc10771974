#include "check.h"
#include "step_work.h"

#include <map>
#include <vector>

using namespace headrace;

namespace {

uint32_t state = 7;
int32_t below(int32_t end) { return int32_t((state = state * 1664525u + 1013904223u) >> 8) % end; }

// Requests of random lengths with random pages; every token id and page id is another one. The last row of each request
// is sampled, and sometimes its first as well.
std::vector<int32_t> random_work(int32_t requests, int32_t most_rows, bool adapted = false) {
    std::vector<int32_t> tokens, starts{0}, contexts, evicted, counts, pages, samples, adapters;
    for (int32_t r = 0; r < requests; r++) {
        const int32_t rows = 1 + below(most_rows);
        for (int32_t i = 0; i < rows; i++) tokens.push_back(1000 + int32_t(tokens.size()));
        contexts.push_back(rows + below(300));
        evicted.push_back(below(3) * 16);
        if (adapted) adapters.push_back(below(4));
        counts.push_back((contexts.back() + 15) / 16);
        for (int32_t i = 0; i < counts.back(); i++) pages.push_back(int32_t(pages.size()));
        if (below(2)) samples.push_back(starts.back());
        starts.push_back(starts.back() + rows);
        if (samples.empty() || samples.back() != starts.back() - 1) samples.push_back(starts.back() - 1);
    }
    const int32_t rows = starts.back();
    std::vector<int32_t> work{rows, requests, int32_t(samples.size()), 1, int32_t(pages.size()), int32_t(adapters.size())};
    for (const auto* part : {&tokens, &starts, &contexts, &evicted, &counts, &pages, &samples, &adapters}) {
        work.insert(work.end(), part->begin(), part->end());
    }
    return work;
}

struct Request {
    std::vector<int32_t> tokens, pages;
    int32_t context, evicted, adapter;
    bool operator==(const Request& other) const {
        return tokens == other.tokens && pages == other.pages && context == other.context && evicted == other.evicted &&
               adapter == other.adapter;
    }
};

// By its first token.
std::map<int32_t, Request> requests_of(const StepWork& work) {
    std::map<int32_t, Request> found;
    const int32_t* page = work.page_ids;
    for (int64_t r = 0; r < work.requests; page += work.page_count[r++]) {
        const int32_t *begin = work.token_ids + work.query_start[r], *end = work.token_ids + work.query_start[r + 1];
        found[*begin] = {{begin, end}, {page, page + work.page_count[r]}, work.context_len[r],
                         work.evicted[r], work.adapted ? work.adapters[r] : 0};
    }
    return found;
}

void check_dealt(const StepWork& before, const Deal& deal, int workers) {
    const StepWork& after = deal.work();
    CHECK(after.rows == before.rows && after.requests == before.requests && after.pages == before.pages);
    CHECK(after.samples == before.samples && after.greedy == before.greedy);
    CHECK(requests_of(after) == requests_of(before));
    for (int64_t s = 0; s < before.samples; s++) {
        CHECK(after.token_ids[after.sample_rows[s]] == before.token_ids[before.sample_rows[s]]);
    }
    CHECK(deal.first(0) == 0 && deal.first(workers) == before.requests);
    int64_t most = 0, least = before.rows;
    for (int worker = 0; worker < workers; worker++) {
        const int64_t rows = after.query_start[deal.first(worker + 1)] - after.query_start[deal.first(worker)];
        most = std::max(most, rows);
        least = std::min(least, rows);
    }
    CHECK(most <= least * 1.25); // contexts differ, so that rows needn't be as even as their cost
}

} // namespace

void test_deal() {
    StepModel model{};
    model.heads = {9, 3, 64, 16, 0, 0};
    model.layer_bytes = 16 * 768;
    constexpr double kRowOps = 7e6;
    Deal deal;
    for (int workers : {2, 3, 8}) {
        int dealt = 0;
        for (int i = 0; i < 200; i++) {
            const std::vector<int32_t> numbers = random_work(workers * 12 + below(60), i % 2 ? 1 : 40, i % 3 == 0);
            const StepWork work(numbers.data());
            if (!deal.make(work, model, kRowOps, workers)) continue;
            check_dealt(work, deal, workers);
            dealt++;
        }
        CHECK(dealt > 150);
    }
    const std::vector<int32_t> lone = random_work(1, 40);
    CHECK(!deal.make(StepWork(lone.data()), model, kRowOps, 2));
}
