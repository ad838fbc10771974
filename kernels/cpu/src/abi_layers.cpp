#include "abi_layers.h"

using namespace headrace;

namespace {

// Calls body(begin, end) until all rows are done.
template <class Body> void share_rows(Team* team, int64_t rows, const Body& body) {
    team->run([&](int worker) {
        while (Range mine = team->claim(worker, rows)) body(mine.begin, mine.end);
    });
}

size_t element_bytes(int32_t is_float) { return is_float ? sizeof(float) : sizeof(uint16_t); }

const char* at(const void* rows, int64_t row, int64_t size, int32_t is_float) {
    return static_cast<const char*>(rows) + row * size * int64_t(element_bytes(is_float));
}

char* at(void* rows, int64_t row, int64_t size, int32_t is_float) {
    return static_cast<char*>(rows) + row * size * int64_t(element_bytes(is_float));
}

} // namespace

void headrace_embed(const Ops* ops, Team* team, const void* table, int32_t is_float, const int32_t* ids, int64_t rows,
                    int64_t size, float* out) {
    share_rows(team, rows, [&](int64_t begin, int64_t end) {
        ops->embed(table, is_float, ids + begin, end - begin, size, out + begin * size);
    });
}

void headrace_rms_norm(const Ops* ops, Team* team, const float* x, const float* weight, float eps, int64_t rows,
                       int64_t size, void* out, int32_t is_float) {
    share_rows(team, rows, [&](int64_t begin, int64_t end) {
        ops->rms_norm(x + begin * size, weight, eps, end - begin, size, at(out, begin, size, is_float), is_float);
    });
}

void headrace_add_rows(const Ops* ops, Team* team, float* residual, const void* x, int32_t is_float, int64_t rows,
                       int64_t size) {
    share_rows(team, rows, [&](int64_t begin, int64_t end) {
        ops->add_rows(residual + begin * size, at(x, begin, size, is_float), is_float, (end - begin) * size);
    });
}

void headrace_silu_and_mul(const Ops* ops, Team* team, const void* gate_up, int64_t rows, int64_t size, void* out,
                           int32_t is_float) {
    share_rows(team, rows, [&](int64_t begin, int64_t end) {
        ops->silu_and_mul(at(gate_up, begin, 2 * size, is_float), end - begin, size, at(out, begin, size, is_float),
                          is_float);
    });
}

void headrace_add_adapters(const Ops* ops, Team* team, const Adapters* adapters, const int32_t* adapter, const void* x,
                           int64_t inputs, void* out, int64_t outputs, int64_t rows, int32_t is_float) {
    std::vector<std::vector<float>> scratch(size_t(team->size()), std::vector<float>(size_t(inputs + adapters->low)));
    team->run([&](int worker) {
        while (Range mine = team->claim(worker, rows)) {
            ops->add_adapters(*adapters, adapter, x, inputs, out, outputs, mine.begin, mine.end,
                              scratch[size_t(worker)].data(), is_float);
        }
    });
}

void headrace_rotary_kv_write(const Ops* ops, Team* team, const StepShape* step, const HeadShape* heads,
                              const RotaryLayer* layer) {
    share_rows(team, step->rows,
               [&](int64_t begin, int64_t end) { ops->rotary_kv_write(*step, *heads, *layer, begin, end); });
}

void headrace_paged_attention(const Ops* ops, Team* team, const StepShape* step, const HeadShape* heads,
                              const AttentionLayer* layer) {
    AttentionPlan plan;
    plan.make(*step, *heads, team->size());
    team->run([&](int worker) { ops->attend(plan, *step, *heads, *layer, *team, worker); });
}

int64_t headrace_sampling_bytes(int64_t vocab) { return SamplingScratch::bytes(vocab); }

void headrace_sample(const Ops* ops, Team* team, const SamplingRow* rows, int64_t count, const float* logits,
                     int64_t vocab, void* memory, SampledRow* out, int32_t* top_ids, double* top_logprobs,
                     int64_t most_top) {
    team->run([&](int worker) {
        char* mine = static_cast<char*>(memory) + worker * SamplingScratch::bytes(vocab);
        for (int64_t row; (row = team->claim_one()) < count;) {
            ops->sample(rows[row], logits + row * vocab, vocab, mine, out[row], top_ids + row * most_top,
                        top_logprobs + row * most_top);
        }
    });
}

void headrace_copy_pages(Team* team, const PageMove* moves, int64_t count, int64_t page_bytes) {
    team->run([&](int) {
        const int64_t parts = count * parts_of(page_bytes);
        for (int64_t part; (part = team->claim_one()) < parts;) copy_part(moves, page_bytes, part);
    });
}

void headrace_thin(Team* team, const HeadShape* heads, const ThinWork* work, uint8_t* arena) {
    team->run([&](int) { thin(*team, *heads, *work, arena); });
}
