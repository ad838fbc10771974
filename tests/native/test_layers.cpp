#include "attention_plan.h"
#include "isas.h"
#include "team.h"
#include "thin.h"

#include <vector>

using namespace headrace;

namespace {

constexpr int64_t kPage = 16;

// Requests whose arena ends with the block of their last page: a long decode, a chunk, and two that begin with pages of the
// first one, two blocks of them and three.
struct Example {
    HeadShape heads;
    std::vector<int32_t> positions, query_start{0}, context_len;
    std::vector<int64_t> page_offset;
    int64_t pages_per_request = 0, block_bytes;
    std::vector<uint8_t> arena;

    Example(int32_t size, bool is_float, Numbers numbers) : heads{6, 2, size, kPage, 0, is_float, numbers} {
        block_bytes = 2 * heads.kv_heads * heads.head_bytes();
        add(1100, 1);
        add(17, 17);
        add(800, 2, 2 * kBlockTokens / kPage);
        add(830, 1, 3 * kBlockTokens / kPage);
        arena.resize(block_bytes * page_offset.size());
    }

    void add(int32_t context, int32_t rows, int64_t pages_of_first = 0) {
        for (int32_t row = 0; row < rows; row++) positions.push_back(context - rows + row);
        query_start.push_back(query_start.back() + rows);
        context_len.push_back(context);
        pages_per_request = std::max<int64_t>(pages_per_request, (context + kPage - 1) / kPage);
        int64_t old = int64_t(page_offset.size()), requests = int64_t(context_len.size());
        page_offset.resize(requests * pages_per_request);
        for (int64_t i = old; i < int64_t(page_offset.size()); i++) page_offset[i] = i * block_bytes;
        std::copy_n(page_offset.begin(), pages_of_first, page_offset.end() - pages_per_request);
    }

    StepShape step() const {
        return {int64_t(positions.size()), int64_t(context_len.size()), positions.data(),  query_start.data(),
                context_len.data(),        page_offset.data(),          pages_per_request};
    }
};

// Blocks that are reduced together with other requests' rows, counted for each row.
int64_t shared_blocks(const AttentionPlan& plan) {
    int64_t blocks = 0;
    for (const AttentionPiece& piece : plan.pieces()) {
        if (piece.is_shared) blocks += piece.rows * (piece.end_block - piece.first_block);
    }
    return blocks;
}

template <class Element> void attend_and_write(const Ops& ops, int32_t size, bool is_float, Numbers numbers) {
    Example example(size, is_float, numbers);
    const HeadShape& heads = example.heads;
    const StepShape step = example.step();
    const int64_t both = heads.heads + 2 * heads.kv_heads;
    std::vector<float> qkv(step.rows * both * size), cos_sin(1100 * size, 0.5f), weight(size, 1.0f);
    for (size_t i = 0; i < qkv.size(); i++) qkv[i] = float(i * 37 % 101) / 50 - 1;
    std::vector<Element> q(step.rows * heads.heads * size);
    RotaryLayer rotary{qkv.data(), q.data(),       example.arena.data(), nullptr,
                       weight.data(), weight.data(), cos_sin.data(),     both * size,
                       heads.heads * size, 1e-5f,  1};
    ops.rotary_kv_write(step, heads, rotary, 0, step.rows);

    std::vector<float> alone(q.size()), shared(q.size());
    for (int threads : {1, 3}) {
        std::vector<float>& out = threads == 1 ? alone : shared;
        AttentionLayer layer{q.data(), example.arena.data(), out.data(), heads.heads * size, heads.heads * size, 0.1f, 1};
        Team team(threads);
        AttentionPlan plan;
        plan.make(step, heads, threads);
        CHECK(shared_blocks(plan) == heads.heads * (2 * (1 + 2 + 1) + (1 + 1))); // two by all three, one by two
        team.run([&](int worker) {
            for (int repeat = 0; repeat < 3; repeat++) {
                ops.attend(plan, step, heads, layer, team, worker);
                team.barrier();
            }
        });
    }
    CHECK(alone == shared);
}

// A context in an arena that ends with its last page, thinned by one worker and by three.
void thinning(int32_t size, bool is_float, Numbers numbers) {
    const HeadShape heads{2, 2, size, kPage, 0, is_float, numbers};
    const int64_t layer_bytes = 2 * heads.kv_heads * heads.head_bytes();
    const std::vector<int64_t> pages{2 * layer_bytes, 0, 4 * layer_bytes};
    const ThinWork work{2, layer_bytes, pages.data(), 40, 20, 4, 6};
    std::vector<uint8_t> before(size_t(6 * layer_bytes)), alone, shared;
    for (size_t i = 0; i < before.size(); i++) before[i] = uint8_t(i * 37 % 61); // no part of a NaN
    for (int threads : {1, 3}) {
        std::vector<uint8_t>& arena = threads == 1 ? alone : shared;
        arena = before;
        Team team(threads);
        team.run([&](int) { thin(team, heads, work, arena.data()); });
    }
    CHECK(alone == shared);
    CHECK(alone != before);
}

void rows(const Ops& ops) {
    for (int64_t size = 1; size < 40; size++) {
        std::vector<float> x(3 * size, 2.0f), weight(size, 0.5f), out(3 * size);
        ops.rms_norm(x.data(), weight.data(), 0, 3, size, out.data(), true);
        for (float value : out) CHECK(std::abs(value - 0.5f) < 1e-6f);
        ops.add_rows(out.data(), x.data(), true, 3 * size);
        for (float value : out) CHECK(std::abs(value - 2.5f) < 1e-6f);
        std::vector<uint16_t> gate_up(6 * size, 0x4000), product(3 * size);
        ops.silu_and_mul(gate_up.data(), 3, size, product.data(), false);
        for (uint16_t value : product) CHECK(value == product[0] && value != 0);
        const int32_t ids[] = {2, 0};
        ops.embed(x.data(), true, ids, 2, size, out.data());
        CHECK(out[0] == 2.0f);
    }
}

// Rows of every kind share one scratch, whose arrays end where they should; a row is chosen the same again.
void sampling(const Ops& ops) {
    for (int64_t vocab : {1, 63, 64, 200, 5000}) {
        std::vector<float> logits(vocab);
        for (int64_t i = 0; i < vocab; i++) logits[i] = float(i * 31 % 17) / 8;
        std::vector<char> memory(SamplingScratch::bytes(vocab));
        std::vector<int32_t> ids(vocab), tokens{0, int32_t(vocab - 1), 0};
        std::vector<double> logprobs(vocab);
        std::vector<int32_t> chosen;
        for (int repeat = 0; repeat < 2; repeat++) {
            for (int kind = 0; kind < 48; kind++) {
                SamplingRow row{};
                row.temperature = kind % 3;
                row.top_p = kind % 4 ? 1.0 : 0.9;
                row.min_p = kind % 8 ? 0.0 : 0.01;
                row.top_k = kind % 5 ? 0 : 150;
                row.seed = uint64_t(kind);
                row.forced = -1;
                row.top_logprobs = int32_t(kind % 2 ? vocab : -1);
                row.repetition = 1.5f;
                row.tokens = tokens.data();
                row.token_count = kind % 7 ? 0 : 3;
                SampledRow out{};
                ops.sample(row, logits.data(), vocab, memory.data(), out, ids.data(), logprobs.data());
                CHECK(out.token >= 0 && out.token < vocab);
                if (repeat == 0) chosen.push_back(out.token);
                CHECK(chosen[kind] == out.token);
            }
        }
    }
}

} // namespace

void test_layers() {
    for (int32_t size : {6, 80}) {
        for (Numbers numbers : {Numbers::kPlain, Numbers::kInt8, Numbers::kE4m3}) {
            thinning(size, false, numbers);
            thinning(size, true, numbers);
        }
    }
    on_every_isa([](const Ops& ops) {
        for (int32_t size : {6, 36, 64, 80}) {
            for (Numbers numbers : {Numbers::kPlain, Numbers::kInt8, Numbers::kE4m3}) {
                attend_and_write<uint16_t>(ops, size, false, numbers);
                attend_and_write<float>(ops, size, true, numbers);
            }
        }
        rows(ops);
        sampling(ops);
    });
}
