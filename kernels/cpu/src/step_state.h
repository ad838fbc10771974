// One model's memory for its steps, and where the rows of the current step stand. No vector code here.
#pragma once

#include "attention_plan.h"
#include "sampling_types.h"
#include "step_work.h"
#include "team.h"

#include <chrono>
#include <memory>
#include <vector>

namespace headrace {

// Up to so many rows each worker prepares the inputs of a product for itself: it costs less than a barrier.
constexpr int64_t kOwnRows = 4;
// Rows whose logits are kept at once.
constexpr int64_t kLogitRows = 64;

struct Unmap {
    size_t bytes = 0;
    void operator()(uint8_t* begin) const;
};

// Huge pages where the system has them; zero until first written.
class Memory {
  public:
    Memory() = default;
    explicit Memory(int64_t bytes);
    template <class T> T* as() const { return reinterpret_cast<T*>(begin_.get()); }

  private:
    std::unique_ptr<uint8_t, Unmap> begin_;
};

// Rows that a product takes, in whatever type its weights want: float, bf16, or int8 with scales.
class InputRows {
  public:
    InputRows() = default;
    InputRows(int64_t rows, int64_t widest);
    // How rows of `size` lie for weights of `format`. Each begins at a cache line, so workers share none.
    // `first` rows before them are somebody else's.
    Activations shaped(Format format, int64_t size, int64_t first = 0) const;

  private:
    int64_t widest_ = 0;
    Memory values_, scales_, offsets_;
};

// Rows of a step that are computed together: all of them, or those of one worker's requests.
struct StepShare {
    int64_t begin = 0, end = 0;  // rows of the step
    StepShape shape{};           // of its requests
    AttentionPlan plan;
    std::vector<int64_t> pages;  // where in the arena they begin, those that attention reads, each once
    std::vector<int32_t> kept;   // the rows that are sampled, each once, in ascending order
    Range greedy{};              // places of its greedy samples
    Gate ready;                  // advances when their inputs of the head are written, if each worker has a share
    uint32_t ready_before = 0;   // its value before this step
};

class Step {
  public:
    Step(const StepModel& model, const StepLayer* layers, int threads, int64_t most_rows);

    // Lays out the step's rows and pages. From `dealt_rows` for each worker on, each computes requests of its own. The team
    // isn't needed for that.
    void begin(const int32_t* work, uint8_t* kv, int32_t* tokens, const StepSampling& sampling, int64_t dealt_rows);

    const StepModel model;
    const std::vector<StepLayer> layers;
    const int threads;

    // The current step.
    StepWork work;
    std::vector<StepShare> shares; // of each worker; the first one's is everybody's if only that is used
    int shares_used = 1;
    std::vector<std::unique_ptr<Team>> alone; // of each worker, to compute its share with
    uint8_t* kv = nullptr;
    int32_t* tokens = nullptr; // [samples] chosen
    StepSampling sampling{};

    // Rows of the step. qkv holds floats; the turned queries take their place, as the type that attention reads.
    Memory residual, qkv, attended, gated, logits;
    Memory best; // [threads][best_stride] the greatest logit, or estimate of one, that a worker has seen of each row
    const int64_t best_stride;
    // Of greedy rows that go through a screen: [tiles][rows] the most that a logit can be, [rows] a logit that is certain,
    // [threads][best_stride] what workers have seen of exact logits, and likewise how great the rows' inputs are.
    Memory most, least, exact_best, norms;
    // Samples stand share by share, the greedy ones first: the one at a place, and where its row stands after the last
    // attention, when the rows that aren't sampled have gone.
    int64_t sample_at(int64_t place) const { return order_[size_t(place)]; }
    int64_t row_at(int64_t place) const { return sample_row_[size_t(order_[size_t(place)])]; }
    // What sampling keeps for each worker.
    void* sampling_memory(int worker) const {
        return sampling_.as<uint8_t>() + worker * SamplingScratch::bytes(model.head.outputs);
    }
    // Of rows with adapters: which one each has (no numbers, if none has any), and what they were shrunk to for a product,
    // from some row on; and each worker's: the rows that it shrinks for itself, and one row as floats.
    std::vector<int32_t> adapter_of_row;
    float* low(int64_t first) const { return low_.as<float>() + first * most_low_; }
    float* own_low(int worker) const { return own_low_.as<float>() + worker * kOwnRows * most_low_; }
    float* wide_row(int worker) const { return wide_rows_.as<float>() + worker * widest_; }
    InputRows inputs;                 // of layers, as the weights want them
    InputRows head_inputs, rounded;   // of greedy samples, as the head wants them and as its screen does
    std::vector<InputRows> own_inputs, own_rounded; // of each worker

    // Seconds of worker 0 in each phase since they were last read, if anybody wants to know.
    bool timed = false;
    double seconds[kPhases] = {};

  private:
    bool divide(int64_t dealt_rows);
    void fill(StepShare& share, int64_t first, int64_t end, int workers);

    Memory sampling_, low_, own_low_, wide_rows_;
    int64_t most_low_ = 0, widest_ = 0; // of a row that is shrunk, and of one that isn't
    int64_t most_pages_ = 0; // of one request
    std::vector<int32_t> positions_;
    std::vector<int64_t> page_offset_;
    Deal deal_;
    std::vector<int64_t> sample_row_, order_;
};

// Counts the time of phases, on one worker.
class Stopwatch {
  public:
    Stopwatch(Step& step, int worker) : step_(step), runs_(step.timed && worker == 0) {
        if (runs_) last_ = Clock::now();
    }
    void lap(Phase phase) {
        if (!runs_) return;
        Clock::time_point now = Clock::now();
        step_.seconds[int(phase)] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

  private:
    using Clock = std::chrono::steady_clock;
    Step& step_;
    bool runs_;
    Clock::time_point last_;
};

} // namespace headrace
