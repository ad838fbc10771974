// One step's attention, cut into pieces of work once for all layers. Plain integers: no vector code here.
//
// A task is (request, some of its rows, key head): the tokens of the rows and the query heads that share the key head
// stand as one tile, so that each key and value is read once for all of them. A task reduces its context in blocks of
// kBlockTokens, which begin at multiples of that, and merges the blocks in their order. Both depend on nothing but the
// position of a row, so its bits are the same in every batch, chunk and piece.
//
//   a task's context          |   block 0   |   block 1   |   block 2   | block 3 |
//   in one piece              |-------- a worker merges as it goes -------------->|
//   cut into two pieces       |------- worker A --------->|------ worker B ------>|   the blocks' results are kept,
//                                                                                     and who ends last merges them
//   blocks 0 and 1 stand on   |------- worker A --------->|------ worker B ------>|
//   pages that two requests           rows of both        |------ worker C ------>|
//   share, a common prefix
//
// Blocks that requests share are reduced for the rows of all of them at once, as in Juravsky et al., "Hydragen", 2024, and
// Ye et al., "Cascade Inference", 2024: a prefix is read once for each tile of rows, not once for each request.
#pragma once

#include "attention_types.h"

#include <memory>
#include <vector>

namespace headrace {

constexpr int64_t kBlockTokens = 256;

// A query head of one token.
struct AttentionRow {
    int32_t row;
    int32_t head;
    int32_t position;
    int32_t task;
    int32_t place; // among the task's rows
};

struct AttentionTask {
    int32_t first_row; // in AttentionPlan::rows
    int32_t rows;
    int32_t first_block;
    int32_t end_block;
    int32_t pieces;
    int64_t first_partial; // of more than one piece: where the blocks' results begin, in floats
};

// Some blocks of one task, or of several whose requests have these blocks on the same pages.
struct AttentionPiece {
    int32_t request; // whose pages they are, one of them
    int32_t kv_head;
    int32_t first_row; // in AttentionPlan::rows
    int32_t rows;
    int32_t position; // the least of the rows
    int32_t end;      // behind the greatest position
    int32_t first_block;
    int32_t end_block;
    bool is_shared; // by several tasks
};

class AttentionPlan {
  public:
    // Pieces for a team of `threads`, the costliest first.
    void make(const StepShape& step, const HeadShape& heads, int threads);

    const std::vector<AttentionPiece>& pieces() const { return pieces_; }
    const AttentionRow* rows(const AttentionPiece& piece) const { return rows_.data() + piece.first_row; }
    const AttentionRow* rows(const AttentionTask& task) const { return rows_.data() + task.first_row; }
    const AttentionTask& task(const AttentionRow& row) const { return tasks_[size_t(row.task)]; }
    float* partial(const AttentionTask& task) { return partials_.get() + task.first_partial; }
    // Called by each piece of a task when it has ended: whether it was the last one in this layer.
    bool ends(const AttentionRow& row) {
        const int32_t pieces = task(row).pieces;
        return (ended_[row.task].fetch_add(1, std::memory_order_acq_rel) + 1) % pieces == 0;
    }
    // Most rows (tokens times the heads that share a key head) that one piece has.
    int64_t most_rows() const { return most_rows_; }
    // One worker's own memory, `scratch_floats(most_rows, heads)` of it, from the beginning of a cache line on.
    float* scratch(int worker) { return first_scratch_ + worker * scratch_stride_; }

  private:
    // Memory for `count` objects at least, kept from step to step.
    template <class T> struct Kept {
        std::unique_ptr<T[]> memory;
        int64_t capacity = 0;
        T* get() { return memory.get(); }
        T& operator[](int64_t i) { return memory[i]; }
        void reserve(int64_t count) {
            if (count <= capacity) return;
            capacity = count + count / 2;
            memory.reset(new T[capacity]);
        }
    };

    // A request whose rows are one task for each key head, few enough to stand beside others'.
    struct Member {
        int32_t request;
        int32_t first_task;
        int32_t tokens;
        int32_t whole_blocks; // that all its rows see, from the first token on
    };

    void cut(const StepShape& step, const HeadShape& heads);
    void share(const StepShape& step, const HeadShape& heads);
    void share_blocks(const StepShape& step, const HeadShape& heads, int64_t begin, int64_t end, int64_t block);
    void add_shared(const HeadShape& heads, int64_t begin, int64_t end, int64_t first_block, int64_t end_block);
    void divide(const HeadShape& heads, int threads);
    void keep_partials(const HeadShape& heads);

    std::vector<AttentionRow> rows_;
    std::vector<AttentionTask> tasks_;
    std::vector<AttentionPiece> pieces_; // first one for each task, in their order
    std::vector<Member> members_;
    Kept<std::atomic<int32_t>> ended_;
    Kept<float> partials_;
    Kept<float> scratch_;
    float* first_scratch_ = nullptr;
    int64_t scratch_stride_ = 0;
    int64_t most_rows_ = 0;
};

// The result of one block: the greatest score of each row, the sum of its weights, and from partial_values(rows) on its
// head_size weighted values.
constexpr int64_t partial_values(int64_t rows) { return (2 * rows + 15) / 16 * 16; }
constexpr int64_t partial_floats(int64_t rows, int64_t head_size) { return partial_values(rows) + rows * head_size; }

// A block's numbers of a byte as what they are multiplied as, and the scales of its keys and values.
inline int64_t expanded_floats(const HeadShape& heads) {
    return heads.has_scales() ? (heads.head_size + 2) * kBlockTokens : 0;
}

// That, scores and weights of one block, and two partial results.
inline int64_t scratch_floats(int64_t rows, const HeadShape& heads) {
    return expanded_floats(heads) + rows * 2 * kBlockTokens + 2 * partial_floats(rows, heads.head_size);
}

} // namespace headrace
