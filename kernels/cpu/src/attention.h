// Paged attention, read in place: decode tokens and prefill chunks in one batch.
//
// A piece (attention_plan.h) has the rows of one key head: for each token of a request's chunk, or of several requests',
// the query heads that share it. Its context is reduced block by block:
//
//   scores     rows x tokens     from queries and keys, W tokens in a vector, a tile of rows at once
//   weights    rows x tokens     exp(scale * score - greatest of the block), rounded to the type of the values
//   values     rows x head_size  sums of weights times values, W components in a vector, in the order of the tokens
//
// Tokens that a row doesn't see get the weight 0, which changes no bit of a sum, and a row that sees nothing of a block
// takes no part in it. So what a row gets depends on its position alone, whichever rows share its tile.
//
// Memory sets the speed of decoding. While a block is reduced, the next one (of this piece or of the worker's next) is
// fetched, a few lines with each step of the computation, so that memory is never idle.
#pragma once

#include "attention_products.h"
#include "exponential.h"
#include "team.h"
#include "tiles.h"

namespace headrace::HEADRACE_ISA {

// Vectors of the next block that are fetched with each vector of weights.
constexpr int kFetchedWithWeights = 2;

// One worker's pass over its pieces of one layer. T is what is multiplied, and KV how it comes from the pages.
template <class T, class KV> class Attention {
    using Element = typename T::Element;
    using Number = typename KV::Number;
    using Located = KVBlock<Number>; // in the pages
    using Seen = KVBlock<Element>;   // where it is multiplied
    static constexpr int64_t kPerWord = T::kPerWord;

  public:
    Attention(AttentionPlan& plan, const StepShape& step, const HeadShape& heads, const AttentionLayer& layer,
              int worker)
        : plan_(plan), step_(step), heads_(heads), layer_(layer), kv_(heads, plan.scratch(worker)),
          products_(heads) {
        float* scratch = plan.scratch(worker) + expanded_floats(heads);
        scores_ = scratch;
        weights_ = reinterpret_cast<Element*>(scratch + plan.most_rows() * kBlockTokens);
        state_ = scratch + plan.most_rows() * 2 * kBlockTokens;
        block_result_ = state_ + partial_floats(plan.most_rows(), heads.head_size);
    }

    void work(Team& team) {
        const auto& pieces = plan_.pieces();
        const int64_t count = int64_t(pieces.size());
        int64_t mine = team.claim_one();
        if (mine < count) locate(pieces[mine], pieces[mine].first_block, *ahead_);
        while (mine < count) {
            int64_t next = team.claim_one();
            attend(pieces[mine], next < count ? &pieces[next] : nullptr);
            mine = next;
        }
    }

  private:
    // A partial result (attention_plan.h) as its three parts.
    struct Result {
        float* greatest;
        float* sum;
        float* values;
    };

    static Result parts(float* partial, int64_t rows) {
        return {partial, partial + rows, partial + partial_values(rows)};
    }

    void locate(const AttentionPiece& piece, int64_t index, Located& block) const {
        const int64_t start = index * kBlockTokens, page_tokens = heads_.page_tokens;
        const int64_t first = std::max<int64_t>(0, heads_.first_visible(piece.position) - start);
        const int64_t end = std::min<int64_t>(kBlockTokens, piece.end - start);
        const int64_t* pages = step_.page_offset + piece.request * step_.pages_per_request;
        const int64_t to_keys = piece.kv_head * heads_.head_bytes(), to_values = heads_.kv_heads * heads_.head_bytes();
        block.first = int32_t(first / W * W);
        block.end = int32_t(end);
        block.spans_used = 0;
        int64_t page = (start + block.first) / page_tokens, offset = (start + block.first) % page_tokens;
        for (int64_t token = block.first; token < end; page++, offset = 0) {
            auto& span = block.spans[block.spans_used++];
            const uint8_t* head = layer_.kv + pages[page] + to_keys;
            span.keys = reinterpret_cast<const Number*>(head);
            span.values = reinterpret_cast<const Number*>(head + to_values);
            span.offset = int32_t(offset);
            span.token = int32_t(token);
            span.count = int32_t(std::min(page_tokens - offset, end - token));
            token += span.count;
        }
    }

    // Locates the block that is to be reduced next, and lets it be fetched meanwhile: keys, then values.
    void look_ahead(const AttentionPiece& piece, int64_t index) {
        locate(piece, index, *ahead_);
        for (int32_t s = 0; s < ahead_->spans_used; s++) stream_.add(ahead_->spans[s].keys, heads_.head_bytes());
        for (int32_t s = 0; s < ahead_->spans_used; s++) kv_.add_values(ahead_->spans[s], stream_);
    }

    // What is kept of one block of a task that has several pieces.
    Result kept(const AttentionTask& task, int64_t block) {
        const int64_t place = (block - task.first_block) * partial_floats(task.rows, heads_.head_size);
        return parts(plan_.partial(task) + place, task.rows);
    }

    void attend(const AttentionPiece& piece, const AttentionPiece* next) {
        const AttentionRow* rows = plan_.rows(piece);
        const AttentionTask& task = plan_.task(rows[0]);
        const bool is_whole = task.pieces == 1;
        const Result state = parts(state_, piece.rows), result = parts(block_result_, piece.rows);
        for (int64_t index = piece.first_block; index < piece.end_block; index++) {
            std::swap(here_, ahead_);
            stream_.clear();
            if (index + 1 < piece.end_block) {
                look_ahead(piece, index + 1);
            } else if (next) {
                look_ahead(*next, next->first_block);
            }
            if (is_whole && index == piece.first_block) {
                reduce(piece, index, state);
            } else if (is_whole) {
                reduce(piece, index, result);
                merge(result, state, piece.rows);
            } else if (piece.is_shared) {
                reduce(piece, index, result);
                keep(result, rows, piece.rows, index);
            } else {
                reduce(piece, index, kept(task, index));
            }
        }
        if (is_whole) return write(rows, piece.rows, state);
        for (const AttentionRow* row = rows; row < rows + piece.rows; row++) {
            if (row->place == 0 && plan_.ends(*row)) finish(plan_.task(*row));
        }
    }

    // Brings one block's result to each row's task.
    void keep(Result result, const AttentionRow* rows, int64_t count, int64_t index) {
        const int64_t size = heads_.head_size;
        for (int64_t row = 0; row < count; row++) {
            const Result to = kept(plan_.task(rows[row]), index);
            to.greatest[rows[row].place] = result.greatest[row];
            to.sum[rows[row].place] = result.sum[row];
            std::memcpy(to.values + rows[row].place * size, result.values + row * size, size_t(size) * sizeof(float));
        }
    }

    // Merges the results of a task's blocks, all of which are kept.
    void finish(const AttentionTask& task) {
        const Result state = kept(task, task.first_block);
        for (int64_t block = task.first_block + 1; block < task.end_block; block++) {
            merge(kept(task, block), state, task.rows);
        }
        write(plan_.rows(task), task.rows, state);
    }

    // One block's result for all rows of the piece.
    void reduce(const AttentionPiece& piece, int64_t index, Result result) {
        const int64_t rows = piece.rows, size = heads_.head_size, start = index * kBlockTokens;
        const AttentionRow* places = plan_.rows(piece);
        const Seen& keys = kv_.keys(*here_, stream_);
        const auto query = [&](int64_t row) {
            return static_cast<const Element*>(layer_.q) + places[row].row * layer_.q_stride + places[row].head * size;
        };
        Stream* fetched = KV::kFetches ? nullptr : &stream_;
        products_.score(keys, kv_.page_tokens(), rows, query, scores_, fetched);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t position = places[row].position;
            weigh(row, std::max<int64_t>(0, heads_.first_visible(position) - start),
                  std::min<int64_t>(kBlockTokens, position + 1 - start), result);
        }
        products_.sum(kv_.values(*here_, stream_), rows, weights_, result.values, fetched);
    }

    // Weights of one row, which sees the tokens first..end of the block.
    HEADRACE_INLINE void weigh(int64_t row, int64_t first, int64_t end, Result result) {
        float* scores = scores_ + row * kBlockTokens;
        Element* weights = weights_ + row * kBlockTokens;
        const int64_t stop = (here_->end + W - 1) / W * W;
        if (first >= end) {
            for (int64_t token = here_->first; token < stop; token += W) T::write(weights + token, zero(), W);
            result.greatest[row] = -kInfinity;
            result.sum[row] = 0;
            return;
        }
        kv_.scale_scores(scores, here_->first, stop);
        hide_outside(scores, first, end, stop);
        F greatest = set1(-kInfinity);
        for (int64_t token = here_->first; token < stop; token += W) greatest = max(greatest, load(scores + token));
        const float shift = reduce_max(greatest) * layer_.scale;
        F sum = zero();
        for (int64_t token = here_->first; token < stop; token += W) {
            stream_.fetch(kFetchedWithWeights);
            F weight = exp(fma(load(scores + token), set1(layer_.scale), set1(-shift)));
            sum = add(sum, weight);
            T::write(weights + token, kv_.weight(weight, token), W);
        }
        result.greatest[row] = shift;
        result.sum[row] = reduce_add(sum);
    }

    // Scores outside first..end become -inf, whose weight is 0: also where stale keys have left a NaN.
    HEADRACE_INLINE void hide_outside(float* scores, int64_t first, int64_t end, int64_t stop) const {
        int64_t token = here_->first;
        for (; token + W <= first; token += W) store(scores + token, set1(-kInfinity));
        if (token < first) store(scores + token, min(load(scores + token), load(kEdges.values + 2 * W - (first - token))));
        token = end / W * W;
        if (token < end) {
            store(scores + token, min(load(scores + token), load(kEdges.values + W - (end - token))));
            token += W;
        }
        for (; token < stop; token += W) store(scores + token, set1(-kInfinity));
    }

    // Adds a later block's result to the state. A row that has seen nothing before takes it as it is.
    void merge(Result block, Result state, int64_t rows) const {
        const int64_t size = heads_.head_size;
        for (int64_t row = 0; row < rows; row++) {
            if (block.sum[row] == 0) continue;
            const float greatest = std::max(state.greatest[row], block.greatest[row]);
            const F old_share = state.sum[row] == 0 ? zero() : exp(set1(state.greatest[row] - greatest));
            const F new_share = exp(set1(block.greatest[row] - greatest));
            float* values = state.values + row * size;
            const float* added = block.values + row * size;
            for_vectors(size, [&](int64_t i, int n) {
                F old_part = mul(F32::read(values + i, n), old_share);
                F32::write(values + i, fma(F32::read(added + i, n), new_share, old_part), n);
            });
            F sum = fma(set1(block.sum[row]), new_share, mul(set1(state.sum[row]), old_share));
            store_n(&state.sum[row], sum, 1);
            state.greatest[row] = greatest;
        }
    }

    void write(const AttentionRow* rows, int64_t count, Result state) const {
        const int64_t size = heads_.head_size;
        with_element(layer_.out_is_float, [&](auto type) {
            using Out = decltype(type);
            for (int64_t row = 0; row < count; row++) {
                auto* out = static_cast<typename Out::Element*>(layer_.out) + rows[row].row * layer_.out_stride +
                            rows[row].head * size;
                const F share = set1(1.0f / state.sum[row]);
                for_vectors(size, [&](int64_t i, int n) {
                    Out::write(out + i, mul(F32::read(state.values + row * size + i, n), share), n);
                });
            }
        });
    }

    AttentionPlan& plan_;
    const StepShape& step_;
    const HeadShape& heads_;
    const AttentionLayer& layer_;
    float* scores_;       // [rows, kBlockTokens] of this worker's piece, as is all below
    Element* weights_;    // [rows, kBlockTokens]
    float* state_;        // what is reduced so far
    float* block_result_; // what is to be merged into it
    KV kv_;
    BlockProducts<T> products_;
    Located blocks_[2];
    Located* here_ = &blocks_[0];
    Located* ahead_ = &blocks_[1]; // what is reduced next
    Stream stream_;                // the memory of that
};

// One worker's share of a layer; all workers of the team call it, and a barrier has to follow.
inline void attend(AttentionPlan& plan, const StepShape& step, const HeadShape& heads, const AttentionLayer& layer,
                   Team& team, int worker) {
    with_element(heads.is_float, [&](auto type) {
        using T = decltype(type);
        if (heads.has_scales()) {
            Attention<T, Expanded<T>>(plan, step, heads, layer, worker).work(team);
        } else {
            Attention<T, InPlace<T>>(plan, step, heads, layer, worker).work(team);
        }
    });
}

} // namespace headrace::HEADRACE_ISA
