#include "attention_plan.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr int64_t kRowsPerTask = 24;
constexpr int64_t kPiecesPerThread = 4;
constexpr int64_t kLineFloats = 16;
// Reading a token's key and value costs about as much as multiplying them with this many rows.
constexpr int64_t kTokenCost = 8;

int64_t cost(const AttentionPiece& piece, const HeadShape& heads) {
    int64_t first = std::max(piece.first_block * kBlockTokens, heads.first_visible(piece.position));
    int64_t end = std::min<int64_t>(piece.end_block * kBlockTokens, piece.end);
    return (end - first) * (kTokenCost + piece.rows);
}

int64_t tokens_of_a_task(const HeadShape& heads) { return std::max<int64_t>(1, kRowsPerTask / heads.shared()); }

// Pages on which whole blocks stand, from the first token on.
int64_t pages_of(int64_t blocks, const HeadShape& heads) {
    return (blocks * kBlockTokens + heads.page_tokens - 1) / heads.page_tokens;
}

} // namespace

void AttentionPlan::make(const StepShape& step, const HeadShape& heads, int threads) {
    cut(step, heads);
    share(step, heads);
    if (threads > 1) divide(heads, threads);
    keep_partials(heads);
    std::stable_sort(pieces_.begin(), pieces_.end(), [&](const AttentionPiece& a, const AttentionPiece& b) {
        return cost(a, heads) > cost(b, heads);
    });
    most_rows_ = 0;
    for (const AttentionPiece& piece : pieces_) most_rows_ = std::max<int64_t>(most_rows_, piece.rows);
    scratch_stride_ = (scratch_floats(most_rows_, heads) + kLineFloats - 1) / kLineFloats * kLineFloats;
    scratch_.reserve(scratch_stride_ * threads + kLineFloats);
    const auto begin = reinterpret_cast<uintptr_t>(scratch_.get()) / sizeof(float);
    first_scratch_ = scratch_.get() + (kLineFloats - begin % kLineFloats) % kLineFloats;
}

// Tasks, each in one piece.
void AttentionPlan::cut(const StepShape& step, const HeadShape& heads) {
    rows_.clear();
    tasks_.clear();
    pieces_.clear();
    members_.clear();
    const int64_t most_tokens = tokens_of_a_task(heads), shared = heads.shared();
    for (int64_t request = 0; request < step.requests; request++) {
        const int64_t first_row = step.query_start[request], end_row = step.query_start[request + 1];
        const int64_t before = step.context_len[request] - (end_row - first_row);
        if (2 * (end_row - first_row) <= most_tokens && heads.first_visible(before) == 0) {
            members_.push_back({int32_t(request), int32_t(tasks_.size()), int32_t(end_row - first_row),
                                int32_t(before / kBlockTokens)});
        }
        for (int64_t row = first_row; row < end_row; row += most_tokens) {
            const int64_t tokens = std::min(most_tokens, end_row - row), position = before + row - first_row;
            AttentionPiece piece{};
            piece.request = int32_t(request);
            piece.rows = int32_t(tokens * shared);
            piece.position = int32_t(position);
            piece.end = int32_t(position + tokens);
            piece.first_block = int32_t(heads.first_visible(position) / kBlockTokens);
            piece.end_block = int32_t((piece.end - 1) / kBlockTokens + 1);
            for (piece.kv_head = 0; piece.kv_head < heads.kv_heads; piece.kv_head++) {
                piece.first_row = int32_t(rows_.size());
                for (int32_t place = 0; place < piece.rows; place++) {
                    const int64_t token = place / shared, head = piece.kv_head * shared + place % shared;
                    rows_.push_back({int32_t(row + token), int32_t(head), int32_t(position + token),
                                     int32_t(tasks_.size()), place});
                }
                tasks_.push_back({piece.first_row, piece.rows, piece.first_block, piece.end_block, 1, 0});
                pieces_.push_back(piece);
            }
        }
    }
}

// Takes blocks that several requests have on the same pages out of their pieces, and makes pieces of all their rows.
void AttentionPlan::share(const StepShape& step, const HeadShape& heads) {
    const auto pages = [&](const Member& member) { return step.page_offset + member.request * step.pages_per_request; };
    const auto is_alone = [](const Member& member) { return member.whole_blocks == 0; };
    members_.erase(std::remove_if(members_.begin(), members_.end(), is_alone), members_.end());
    // On pages longer than a block, other numbers of blocks may stand on the same pages: the fewest come first, so that
    // whoever stands between two has the blocks that both have.
    std::sort(members_.begin(), members_.end(), [&](const Member& a, const Member& b) {
        const int64_t* end_a = pages(a) + pages_of(a.whole_blocks, heads);
        const int64_t* end_b = pages(b) + pages_of(b.whole_blocks, heads);
        if (std::lexicographical_compare(pages(a), end_a, pages(b), end_b)) return true;
        return a.whole_blocks < b.whole_blocks && std::equal(pages(a), end_a, pages(b), end_b);
    });
    share_blocks(step, heads, 0, int64_t(members_.size()), 0);
}

// Of the members begin..end in their order, which share all blocks before `block`.
void AttentionPlan::share_blocks(const StepShape& step, const HeadShape& heads, int64_t begin, int64_t end,
                                 int64_t block) {
    // Of those from `first` to `last`: whoever stands between two shares what they do.
    const auto have_same = [&](int64_t first, int64_t last, int64_t index) {
        const Member &a = members_[size_t(first)], &b = members_[size_t(last)];
        if (index >= std::min(a.whole_blocks, b.whole_blocks)) return false;
        const int64_t from = index * kBlockTokens / heads.page_tokens, to = pages_of(index + 1, heads);
        const int64_t* pages_of_a = step.page_offset + a.request * step.pages_per_request;
        const int64_t* pages_of_b = step.page_offset + b.request * step.pages_per_request;
        return std::equal(pages_of_a + from, pages_of_a + to, pages_of_b + from);
    };
    for (int64_t first = begin, last = first; first < end; first = ++last) {
        while (last + 1 < end && have_same(first, last + 1, block)) last++;
        if (last == first) continue;
        int64_t end_block = block + 1;
        while (have_same(first, last, end_block)) end_block++;
        add_shared(heads, first, last + 1, block, end_block);
        share_blocks(step, heads, first, last + 1, end_block);
    }
}

// Pieces of blocks that the members begin..end share, each for as many of them as a tile has rows for.
void AttentionPlan::add_shared(const HeadShape& heads, int64_t begin, int64_t end, int64_t first_block,
                               int64_t end_block) {
    int64_t tokens = 0;
    for (int64_t m = begin; m < end; m++) tokens += members_[size_t(m)].tokens;
    const int64_t most_tokens = tokens_of_a_task(heads), tiles = (tokens + most_tokens - 1) / most_tokens;
    const int64_t wanted = (tokens + tiles - 1) / tiles;
    for (int64_t first = begin, stop = first; first < end; first = stop) {
        int64_t taken = 0;
        while (stop < end && taken < wanted && taken + members_[size_t(stop)].tokens <= most_tokens) {
            taken += members_[size_t(stop++)].tokens;
        }
        for (int32_t kv_head = 0; kv_head < heads.kv_heads; kv_head++) {
            AttentionPiece piece = pieces_[size_t(members_[size_t(first)].first_task + kv_head)];
            piece.first_row = int32_t(rows_.size());
            piece.first_block = int32_t(first_block);
            piece.end_block = int32_t(end_block);
            piece.is_shared = true;
            for (int64_t m = first; m < stop; m++) {
                const size_t index = size_t(members_[size_t(m)].first_task + kv_head);
                AttentionTask& task = tasks_[index];
                for (int32_t row = 0; row < task.rows; row++) rows_.push_back(rows_[size_t(task.first_row + row)]);
                task.pieces++;
                pieces_[index].first_block = int32_t(end_block);
                piece.position = std::min(piece.position, pieces_[index].position);
                piece.end = std::max(piece.end, pieces_[index].end);
            }
            piece.rows = int32_t(rows_.size()) - piece.first_row;
            pieces_.push_back(piece);
        }
    }
}

// Cuts the pieces that would still keep one thread busy when the others have nothing left.
void AttentionPlan::divide(const HeadShape& heads, int threads) {
    int64_t total = 0;
    for (const AttentionPiece& piece : pieces_) total += cost(piece, heads);
    const int64_t most = std::max<int64_t>(1, total / (threads * kPiecesPerThread));
    const size_t whole = pieces_.size();
    for (size_t i = 0; i < whole; i++) {
        const AttentionPiece all = pieces_[i];
        const int64_t blocks = all.end_block - all.first_block;
        const int64_t parts = std::min(blocks, (cost(all, heads) + most - 1) / most);
        for (int64_t part = 0; part < parts; part++) {
            AttentionPiece piece = all;
            piece.first_block = int32_t(all.first_block + blocks * part / parts);
            piece.end_block = int32_t(all.first_block + blocks * (part + 1) / parts);
            if (part == 0) {
                pieces_[i] = piece;
                continue;
            }
            pieces_.push_back(piece);
            for (const AttentionRow* row = rows(all); row < rows(all) + all.rows; row++) {
                if (row->place == 0) tasks_[size_t(row->task)].pieces++;
            }
        }
    }
}

// Makes room for the results of all blocks of the tasks that have more than one piece.
void AttentionPlan::keep_partials(const HeadShape& heads) {
    int64_t floats = 0;
    for (AttentionTask& task : tasks_) {
        if (task.pieces == 1) continue;
        task.first_partial = floats;
        floats += (task.end_block - task.first_block) * partial_floats(task.rows, heads.head_size);
    }
    partials_.reserve(floats);
    ended_.reserve(int64_t(tasks_.size()));
    for (size_t i = 0; i < tasks_.size(); i++) ended_[int64_t(i)].store(0, std::memory_order_relaxed);
}

} // namespace headrace
