// Choosing one row's token: the definitions are those of kernels/sampling.py and kernels/reference_sampling.py.
//
// A sampled row inverts the cumulative distribution over the order of its tokens (the likeliest first, equal ones by id).
// The head of that order, kHead tokens, settles most rows. A cut that falls behind it takes a longer head, and at last the
// search of nucleus.h; a draw without any cut that falls behind the head goes on over the other tokens by id. What happens
// to a row depends on that row alone.
#pragma once

#include "exponential.h"
#include "nucleus.h"
#include "selection.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kHead = 128;
constexpr int64_t kLongHead = 8 * kHead;

// The lowest id of the greatest logit, if that is a finite number.
inline int32_t greatest_id(const float* logits, int64_t vocab, float greatest) {
    if (!std::isfinite(greatest)) return kNoToken;
    int64_t i = 0;
    for (; i + W <= vocab; i += W) {
        if (uint32_t lanes = lanes_at_least(load(logits + i), set1(greatest))) return int32_t(i + __builtin_ctz(lanes));
    }
    for (; i < vocab; i++) {
        if (logits[i] >= greatest) return int32_t(i);
    }
    return kNoToken;
}

// Writes what changes a row's logits, in the order of kernels.sampling.Adjustment, and its bans.
inline void adjust(const SamplingRow& row, int64_t vocab, float* logits, int32_t* times) {
    if (row.has_penalty()) {
        // A token's count of occurrences in the output, plus 1 as soon as it is known at all.
        for (int64_t i = 0; i < row.token_count; i++) times[row.tokens[i]] = 1;
        for (int64_t i = row.prompt_count; i < row.token_count; i++) times[row.tokens[i]]++;
        for (int64_t i = 0; i < row.token_count; i++) {
            const int32_t token = row.tokens[i], seen = times[token];
            if (seen == 0) continue;
            times[token] = 0;
            float& logit = logits[token];
            if (row.repetition != 1) logit = logit > 0 ? logit / row.repetition : logit * row.repetition;
            if (seen > 1) logit -= float(seen - 1) * row.frequency + row.presence;
        }
    }
    const float never = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < row.bias_count; i++) logits[row.bias_ids[i]] += row.bias[i];
    if (row.allowed) {
        for (int64_t id = 0; id < vocab; id++) {
            if (!(row.allowed[id / 8] >> id % 8 & 1)) logits[id] = never;
        }
    }
    for (int64_t i = 0; i < row.banned_count; i++) logits[row.banned[i]] = never;
}

// Draws from one row's distribution.
class Draw {
  public:
    Draw(const SamplingRow& row, const float* logits, int64_t vocab, SamplingScratch& scratch)
        : row_(row), vocab_(vocab), scratch_(scratch), uniform_(uniform(row.seed, row.position)),
          log_min_p_(std::log(row.min_p)), top_k_(row.top_k > 0 && row.top_k < vocab ? row.top_k : vocab) {
        scale(logits, group_maxima(logits, vocab, scratch.maxima));
    }

    int32_t token() {
        if (!std::isfinite(total_)) return kNoToken;
        Selection selection(scratch_.scaled, vocab_, 0, scratch_);
        const int64_t found = selection.first(kHead);
        if (settle(found)) return chosen_;
        if (is_open()) return behind(found);
        if (settle(selection.first(kLongHead))) return chosen_;
        if (top_k_ >= vocab_) return search();
        settle(selection.first(vocab_));
        return chosen_;
    }

  private:
    bool is_open() const { return top_k_ >= vocab_ && row_.top_p >= 1 && std::isinf(log_min_p_); }

    // scaled = (logit - greatest) / temperature, and of each group the greatest and the sum of its weights, exp(scaled).
    void scale(const float* logits, float greatest) {
        const float temperature = float(row_.temperature);
        for (int64_t first = 0; first < vocab_; first += kGroup) {
            F most = set1(-std::numeric_limits<float>::infinity()), sum = zero();
            const int64_t end = std::min(vocab_, first + kGroup);
            int64_t i = first;
            for (; i + W <= end; i += W) {
                F scaled = div(sub(load(logits + i), set1(greatest)), set1(temperature));
                store(scratch_.scaled + i, scaled);
                most = max(scaled, most);
                sum = add(sum, exp(scaled));
            }
            float maximum = reduce_max(most);
            double weight = reduce_add(sum);
            for (; i < end; i++) {
                float scaled = (logits[i] - greatest) / temperature;
                scratch_.scaled[i] = scaled;
                maximum = std::max(maximum, scaled);
                weight += std::exp(double(scaled));
            }
            scratch_.maxima[first / kGroup] = maximum;
            scratch_.sums[first / kGroup] = weight;
            total_ += weight;
        }
    }

    // Cumulative weights of the first `found` tokens, and how many of these are certain: the last may tie with others.
    void weigh(int64_t found) {
        const Candidate* head = scratch_.candidates;
        double sum = 0;
        for (int64_t place = 0; place < found; place++) {
            sum += std::exp(double(head[place].value));
            scratch_.mass[place] = sum;
        }
        known_ = found;
        if (found == vocab_) return;
        while (known_ > 0 && head[known_ - 1].value == head[found - 1].value) known_--;
    }

    double mass_of(int64_t tokens) const { return tokens > 0 ? scratch_.mass[tokens - 1] : 0; }

    // Chooses within the first `found` tokens; whether they suffice for that.
    bool settle(int64_t found) {
        const Candidate* head = scratch_.candidates;
        const double* mass = scratch_.mass;
        weigh(found);
        int64_t kept = 0;
        const int64_t most = std::min(known_, top_k_);
        while (kept < most && head[kept].value >= log_min_p_ && !std::isinf(head[kept].value)) kept++;
        const bool ends_inside = kept < known_ || top_k_ <= known_;
        double share = ends_inside ? mass_of(kept) : total_;
        int64_t last = kept;
        bool bounded = ends_inside;
        if (row_.top_p < 1) {
            const bool only_nucleus = top_k_ >= vocab_ && std::isinf(log_min_p_);
            int64_t nucleus = 1;
            while (nucleus <= kept && mass[nucleus - 1] < row_.top_p * share) nucleus++;
            bounded = nucleus <= kept && (ends_inside || only_nucleus);
            last = std::min(nucleus, kept);
            share = mass_of(last);
        }
        int64_t pick = 0;
        while (pick < known_ && mass[pick] <= uniform_ * share) pick++;
        const bool inside = pick < known_;
        if (bounded) pick = std::min(pick, last - 1);
        chosen_ = head[std::min(std::max<int64_t>(pick, 0), found - 1)].id;
        return bounded || (is_open() && inside);
    }

    // Chooses by weight alone: there is no cut by number.
    int32_t search() {
        Nucleus nucleus(scratch_.scaled, vocab_, scratch_);
        float least = float(log_min_p_);
        if (double(least) < log_min_p_) least = std::nextafter(least, 0.0f);
        double share = std::isinf(least) ? total_ : nucleus.weight_of(least);
        if (row_.top_p >= 1) return nucleus.find(uniform_ * share, true, least).candidate.id;
        const Nucleus::Place last = nucleus.find(row_.top_p * share, false, least);
        const Nucleus::Place pick = nucleus.find(uniform_ * last.through, true, least);
        return (pick.candidate < last.candidate ? pick : last).candidate.id;
    }

    // Draws from the tokens outside the head, which the draw has passed, in the order of their ids.
    int32_t behind(int64_t found) const {
        const float bound = scratch_.candidates[found - 1].value; // whatever is greater is in the head
        double left = std::max(0.0, uniform_ * total_ - mass_of(known_));
        for (int64_t first = 0; first < vocab_; first += kGroup) {
            const int64_t group = first / kGroup, end = std::min(vocab_, first + kGroup);
            if (scratch_.maxima[group] <= bound && scratch_.sums[group] <= left) {
                left -= scratch_.sums[group];
                continue;
            }
            for (int64_t i = first; i < end; i++) {
                if (!(scratch_.scaled[i] <= bound)) continue;
                const double weight = std::exp(double(scratch_.scaled[i]));
                if (weight > left) return int32_t(i);
                left -= weight;
            }
        }
        // The sums were rounded to a little more than there is.
        for (int64_t i = vocab_ - 1; i > 0; i--) {
            if (scratch_.scaled[i] <= bound && std::exp(scratch_.scaled[i]) > 0) return int32_t(i);
        }
        return chosen_;
    }

    const SamplingRow& row_;
    int64_t vocab_;
    SamplingScratch& scratch_;
    double uniform_;
    double log_min_p_;
    int64_t top_k_;
    double total_ = 0;
    int64_t known_ = 0;
    int32_t chosen_ = 0;
};

// The raw log-softmax of the chosen token, its rank, and the row's likeliest tokens: before whatever changes the logits.
inline void report(const SamplingRow& row, const float* raw, int64_t vocab, SamplingScratch& scratch, SampledRow& out,
                   int32_t* top_ids, double* top_logprobs) {
    if (out.token == kNoToken) {
        out.rank = 0;
        out.logprob = std::numeric_limits<double>::quiet_NaN();
        return;
    }
    const float greatest = group_maxima(raw, vocab, scratch.maxima), own = raw[out.token];
    double total = 0;
    int64_t before = 0;
    for (int64_t first = 0; first < vocab; first += kGroup) {
        const int64_t end = std::min(vocab, first + kGroup);
        F sum = zero();
        int64_t i = first;
        for (; i + W <= end; i += W) sum = add(sum, exp(sub(load(raw + i), set1(greatest))));
        total += reduce_add(sum);
        for (; i < end; i++) total += std::exp(double(raw[i] - greatest));
        for_reaching(raw, first, end, own, [&](int64_t id) { before += raw[id] > own || id < out.token; });
    }
    total = std::log(total);
    out.rank = int32_t(before + 1);
    out.logprob = double(own - greatest) - total;
    const int64_t count = Selection(raw, vocab, greatest, scratch).first(row.top_logprobs);
    for (int64_t place = 0; place < count; place++) {
        const Candidate& candidate = scratch.candidates[place];
        top_ids[place] = candidate.id;
        top_logprobs[place] = double(candidate.value - greatest) - total;
    }
}

// Chooses the token of one row of logits [vocab], and reports `row.top_logprobs` others if that is not negative.
inline void sample(const SamplingRow& row, const float* logits, int64_t vocab, void* memory, SampledRow& out,
                   int32_t* top_ids, double* top_logprobs) {
    SamplingScratch scratch(memory, vocab);
    if (row.forced >= 0) {
        out.token = row.forced;
    } else {
        const float* chosen_from = logits;
        if (row.changes_logits()) {
            std::copy_n(logits, vocab, scratch.logits);
            adjust(row, vocab, scratch.logits, scratch.times);
            chosen_from = scratch.logits;
        }
        out.token = row.is_greedy()
                        ? greatest_id(chosen_from, vocab, group_maxima(chosen_from, vocab, scratch.maxima))
                        : Draw(row, chosen_from, vocab, scratch).token();
    }
    if (row.top_logprobs >= 0) report(row, logits, vocab, scratch, out, top_ids, top_logprobs);
}

} // namespace headrace::HEADRACE_ISA
