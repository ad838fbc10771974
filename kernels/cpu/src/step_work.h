// One step's work as integers, and how its requests are dealt to workers.
#pragma once

#include "step_types.h"

#include <vector>

namespace headrace {

// One step's work as it crosses the ABI: one array of int32, of which the first six say how long the others are.
//
//   rows requests samples greedy pages adapted | token_ids[rows] query_start[requests + 1] context_len[requests]
//   evicted[requests] page_count[requests] page_ids[pages] sample_rows[samples] adapters[adapted]
//
// The first `greedy` samples only need their greatest logit. A request's positions are those in its context, and so many
// more as were evicted from it. `adapted` is 0, or the number of requests: the adapter of each, counted from 1, or 0 for
// none.
struct StepWork {
    int64_t rows = 0, requests = 0, samples = 0, greedy = 0, pages = 0, adapted = 0;
    const int32_t *token_ids, *query_start, *context_len, *evicted, *page_count, *page_ids, *sample_rows, *adapters;
    StepWork() = default;
    explicit StepWork(const int32_t* work);

    int64_t rows_of(int64_t request) const { return query_start[request + 1] - query_start[request]; }
};

// Requests dealt to workers so that all take about as long: cut in their order, since neighbours share pages and lie close
// in memory, and then exchanged one by one until the loads are even.
class Deal {
  public:
    // Whether it comes out even enough to be worth it. `row_ops` are those of a row's products in one layer.
    bool make(const StepWork& work, const StepModel& model, double row_ops, int workers);

    // After that: the same work, with each worker's requests one behind the other, in the order of the workers.
    const StepWork& work() const { return dealt_; }
    // The first request of a worker in `work()`, and of the last worker + 1 the end.
    int64_t first(int worker) const { return first_[size_t(worker)]; }

  private:
    void cut(int workers);
    // Moves a request from the worker with the most to the one with the least, or swaps two, so that the two come as near to
    // each other as they can; false if nothing helps.
    bool exchange();
    double unevenness() const; // the greatest load in parts of the mean
    void rearrange(const StepWork& work, int workers);

    std::vector<double> cost_;    // of each request
    std::vector<double> load_;    // of each worker
    std::vector<int64_t> order_;  // of requests
    std::vector<int> worker_;     // of each request
    std::vector<int64_t> first_;
    std::vector<int32_t> numbers_;
    StepWork dealt_;
};

} // namespace headrace
