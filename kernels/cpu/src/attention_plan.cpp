#include "attention_plan.h"

namespace headrace {
namespace {

constexpr int64_t kRowsPerTask = 24;
constexpr int64_t kPiecesPerThread = 4;
constexpr int64_t kLineFloats = 16;
// Reading a token's key and value costs about as much as multiplying them with this many rows.
constexpr int64_t kTokenCost = 8;

int64_t cost(const AttentionPiece& piece, const HeadShape& heads) {
    int64_t first = std::max(piece.first_block * kBlockTokens, heads.first_visible(piece.position));
    int64_t end = std::min<int64_t>(piece.end_block * kBlockTokens, piece.position + piece.tokens);
    return (end - first) * (kTokenCost + piece.tokens * heads.shared());
}

} // namespace

void AttentionPlan::make(const StepShape& step, const HeadShape& heads, int threads) {
    cut(step, heads);
    share(heads, threads);
    std::stable_sort(pieces_.begin(), pieces_.end(), [&](const AttentionPiece& a, const AttentionPiece& b) {
        return cost(a, heads) > cost(b, heads);
    });
    scratch_stride_ = (scratch_floats(most_rows_, heads) + kLineFloats - 1) / kLineFloats * kLineFloats;
    scratch_.reserve(scratch_stride_ * threads + kLineFloats);
    const auto begin = reinterpret_cast<uintptr_t>(scratch_.get()) / sizeof(float);
    first_scratch_ = scratch_.get() + (kLineFloats - begin % kLineFloats) % kLineFloats;
}

void AttentionPlan::cut(const StepShape& step, const HeadShape& heads) {
    pieces_.clear();
    most_rows_ = 0;
    const int64_t most_tokens = std::max<int64_t>(1, kRowsPerTask / heads.shared());
    for (int64_t request = 0; request < step.requests; request++) {
        int64_t first_row = step.query_start[request], end_row = step.query_start[request + 1];
        for (int64_t row = first_row; row < end_row; row += most_tokens) {
            int64_t tokens = std::min(most_tokens, end_row - row);
            int64_t position = step.context_len[request] - (end_row - row);
            AttentionPiece piece{};
            piece.request = int32_t(request);
            piece.first_row = int32_t(row);
            piece.tokens = int32_t(tokens);
            piece.position = int32_t(position);
            piece.first_block = int32_t(heads.first_visible(position) / kBlockTokens);
            piece.end_block = int32_t((position + tokens - 1) / kBlockTokens + 1);
            piece.shared = -1;
            most_rows_ = std::max(most_rows_, tokens * heads.shared());
            for (piece.kv_head = 0; piece.kv_head < heads.kv_heads; piece.kv_head++) pieces_.push_back(piece);
        }
    }
}

// Cuts the tasks that would still keep one thread busy when the others have nothing left.
void AttentionPlan::share(const HeadShape& heads, int threads) {
    shared_.clear();
    int64_t total = 0, floats = 0;
    for (const AttentionPiece& task : pieces_) total += cost(task, heads);
    const int64_t most = std::max<int64_t>(1, total / (threads * kPiecesPerThread));
    const size_t tasks = threads > 1 ? pieces_.size() : 0;
    for (size_t i = 0; i < tasks; i++) {
        const AttentionPiece task = pieces_[i];
        int64_t blocks = task.end_block - task.first_block;
        int64_t parts = std::min(blocks, (cost(task, heads) + most - 1) / most);
        if (parts < 2) continue;
        for (int64_t part = 0; part < parts; part++) {
            AttentionPiece piece = task;
            piece.first_block = int32_t(task.first_block + blocks * part / parts);
            piece.end_block = int32_t(task.first_block + blocks * (part + 1) / parts);
            piece.shared = int32_t(shared_.size());
            if (part == 0) {
                pieces_[i] = piece;
            } else {
                pieces_.push_back(piece);
            }
        }
        shared_.push_back({int32_t(parts), task.first_block, int32_t(blocks), floats});
        floats += blocks * partial_floats(task.tokens * heads.shared(), heads.head_size);
    }
    partials_.reserve(floats);
    ended_.reserve(int64_t(shared_.size()));
    for (size_t i = 0; i < shared_.size(); i++) ended_[int64_t(i)].store(0, std::memory_order_relaxed);
}

} // namespace headrace
