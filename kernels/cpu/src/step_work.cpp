#include "step_work.h"

#include <algorithm>
#include <numeric>

namespace headrace {
namespace {

// A worker multiplies so many times while a byte comes from memory, and attention multiplies slower than products do.
constexpr double kOpsPerByte = 11, kAttentionOps = 2.5;
// Of the greatest load to the mean.
constexpr double kEvenEnough = 1.005, kMostUneven = 1.02;
constexpr int kMostExchanges = 8;

// What a request's attention costs in one layer, in operations of products: reading its keys and values, or multiplying
// them with many rows.
double attention_cost(const HeadShape& heads, double rows, double context, double token_bytes) {
    const double seen = heads.window_tokens > 0 ? std::min(context, heads.window_tokens + rows - 1) : context;
    const double pair_ops = 4.0 * heads.heads * heads.head_size * kAttentionOps;
    return std::max(seen * token_bytes * kOpsPerByte, rows * (seen - (rows - 1) / 2) * pair_ops);
}

} // namespace

StepWork::StepWork(const int32_t* work)
    : rows(work[0]), requests(work[1]), samples(work[2]), greedy(work[3]), pages(work[4]), adapted(work[5]) {
    token_ids = work + 6;
    query_start = token_ids + rows;
    context_len = query_start + requests + 1;
    evicted = context_len + requests;
    page_count = evicted + requests;
    page_ids = page_count + requests;
    sample_rows = page_ids + pages;
    adapters = sample_rows + samples;
}

bool Deal::make(const StepWork& work, const StepModel& model, double row_ops, int workers) {
    const double token_bytes = double(model.layer_bytes) / double(model.heads.page_tokens);
    cost_.resize(size_t(work.requests));
    for (int64_t r = 0; r < work.requests; r++) {
        const double rows = double(work.rows_of(r));
        cost_[size_t(r)] = rows * row_ops + attention_cost(model.heads, rows, work.context_len[r], token_bytes);
    }
    cut(workers);
    for (int i = 0; i < kMostExchanges && unevenness() > kEvenEnough && exchange(); i++) {}
    if (unevenness() > kMostUneven) return false;
    rearrange(work, workers);
    return true;
}

void Deal::cut(int workers) {
    const double total = std::accumulate(cost_.begin(), cost_.end(), 0.0);
    worker_.resize(cost_.size());
    load_.assign(size_t(workers), 0);
    double before = 0;
    for (size_t r = 0; r < cost_.size(); before += cost_[r++]) {
        worker_[r] = std::min(int((before + cost_[r] / 2) * workers / total), workers - 1);
        load_[size_t(worker_[r])] += cost_[r];
    }
}

bool Deal::exchange() {
    const auto [least, most] = std::minmax_element(load_.begin(), load_.end());
    const int from = int(most - load_.begin()), to = int(least - load_.begin());
    const double gap = *most - *least;
    double best = gap; // what would be left of it
    size_t given = cost_.size(), taken = cost_.size();
    const auto consider = [&](size_t give, size_t take, double moved) {
        const double left = std::abs(gap - 2 * moved);
        if (left < best) best = left, given = give, taken = take;
    };
    for (size_t give = 0; give < cost_.size(); give++) {
        if (worker_[give] != from) continue;
        consider(give, cost_.size(), cost_[give]);
        for (size_t take = 0; take < cost_.size(); take++) {
            if (worker_[take] == to) consider(give, take, cost_[give] - cost_[take]);
        }
    }
    if (given == cost_.size()) return false;
    const double moved = cost_[given] - (taken < cost_.size() ? cost_[taken] : 0);
    worker_[given] = to;
    if (taken < cost_.size()) worker_[taken] = from;
    load_[size_t(from)] -= moved;
    load_[size_t(to)] += moved;
    return true;
}

double Deal::unevenness() const {
    const double total = std::accumulate(load_.begin(), load_.end(), 0.0);
    return *std::max_element(load_.begin(), load_.end()) * double(load_.size()) / total;
}

void Deal::rearrange(const StepWork& work, int workers) {
    order_.resize(cost_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int64_t a, int64_t b) { return worker_[size_t(a)] < worker_[size_t(b)]; });
    first_.clear();
    for (int worker = 0; worker <= workers; worker++) {
        const auto is_before = [&](int64_t request) { return worker_[size_t(request)] < worker; };
        first_.push_back(std::partition_point(order_.begin(), order_.end(), is_before) - order_.begin());
    }

    numbers_.resize(size_t(6 + work.rows + 4 * work.requests + 1 + work.pages + work.samples + work.adapted));
    const int64_t counts[] = {work.rows, work.requests, work.samples, work.greedy, work.pages, work.adapted};
    int32_t* to = std::copy(std::begin(counts), std::end(counts), numbers_.data());
    for (int64_t r : order_) to = std::copy_n(work.token_ids + work.query_start[r], work.rows_of(r), to);
    *to++ = 0;
    for (int64_t r : order_) *to = *(to - 1) + int32_t(work.rows_of(r)), to++;
    for (int64_t r : order_) *to++ = work.context_len[r];
    for (int64_t r : order_) *to++ = work.evicted[r];
    for (int64_t r : order_) *to++ = work.page_count[r];
    std::vector<const int32_t*> pages(order_.size());
    const int32_t* page = work.page_ids;
    for (int64_t r = 0; r < work.requests; page += work.page_count[r++]) pages[size_t(r)] = page;
    for (int64_t r : order_) to = std::copy_n(pages[size_t(r)], work.page_count[r], to);
    dealt_ = StepWork(numbers_.data());

    std::vector<int32_t> shift(order_.size()); // of a request's rows
    for (size_t place = 0; place < order_.size(); place++) {
        shift[size_t(order_[place])] = dealt_.query_start[place] - work.query_start[order_[place]];
    }
    for (int64_t s = 0; s < work.samples; s++) {
        const int32_t row = work.sample_rows[s];
        const int32_t* request = std::upper_bound(work.query_start, work.query_start + work.requests + 1, row) - 1;
        *to++ = row + shift[size_t(request - work.query_start)];
    }
    if (work.adapted) {
        for (int64_t r : order_) *to++ = work.adapters[r];
    }
}

} // namespace headrace
