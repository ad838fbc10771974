#include "isas.h"
#include "step_state.h"

#include <functional>
#include <vector>

using namespace headrace;

namespace {

constexpr int64_t kPage = 16, kPages = 64, kVocab = 70, kPositions = 64;
constexpr int64_t kDealtRows = 24;
constexpr int64_t kAdapters = 2, kLow = 8;
constexpr int64_t kInner = 24; // no whole run of 16: gate and up are padded to 32 each

// Every matrix of a model in its own memory, which ends where the matrix does.
class Matrices {
  public:
    std::vector<float> numbers(int64_t count) {
        std::vector<float> numbers(size_t(count), 0.0f);
        for (float& number : numbers) number = (float(state_ = state_ * 1664525u + 1013904223u) / 4294967296.0f - 0.5f) / 3;
        return numbers;
    }

    Weights add(Team& team, Format format, int64_t outputs, int64_t inputs) {
        return add(team, format, outputs, inputs, numbers(outputs * inputs));
    }

    Weights add(Team& team, Format format, int64_t outputs, int64_t inputs, const std::vector<float>& numbers) {
        std::vector<Row> rows;
        for (int64_t row = 0; row < outputs; row++) rows.push_back({numbers.data() + row * inputs, Source::kF32, 0});
        Weights weights{format, 0, outputs, inputs, nullptr};
        auto* bytes = static_cast<uint8_t*>(std::aligned_alloc(64, size_t(weights.total_bytes() + 63) / 64 * 64));
        kept_.emplace_back(bytes, std::free);
        pack(team, weights, rows.data(), bytes);
        weights.bytes = bytes;
        return weights;
    }

  private:
    uint32_t state_ = 1;
    std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> kept_;
};

struct Model {
    Matrices matrices;
    std::vector<float> norm, bias, cos_sin, screen_errors, screen_norms;
    std::vector<StepLayer> layers;
    StepModel model{};
    std::vector<int32_t> spans;
    std::vector<std::vector<float>> adapters;
    std::vector<std::vector<uint16_t>> halves;

    // Adapters of a matrix, in memory that ends where they do.
    Adapters adapt(const Weights& weights, bool is_float) {
        auto made = [&](int64_t count) -> const void* {
            adapters.push_back(matrices.numbers(count));
            if (is_float) return adapters.back().data();
            halves.emplace_back(size_t(count));
            portable::ops.float_to_bf16(adapters.back().data(), halves.back().data(), count);
            return halves.back().data();
        };
        const void* shrink = made(kAdapters * kLow * weights.inputs);
        return {shrink, made(kAdapters * weights.tiles() * kLow * kTileOutputs), spans.data(), kLow};
    }

    Model(Format format, int32_t size, bool is_float, Numbers kept = Numbers::kPlain) {
        Team team(2);
        const HeadShape heads{6, 2, size, kPage, 0, is_float, kept};
        const int64_t hidden = 6 * size, both = 10 * size;
        norm.assign(hidden, 1.5f);
        for (int tile = 0; tile < 8; tile++) spans.insert(spans.end(), {tile % 2 * 2, kLow});
        bias.assign(both, 0.01f);
        cos_sin.assign(kPositions * size, 0.7f);
        for (int i = 0; i < 2; i++) {
            StepLayer layer{};
            layer.qkv = matrices.add(team, format, both, hidden);
            layer.output = matrices.add(team, format, hidden, hidden);
            layer.gate_up = matrices.add(team, format, 64, hidden);
            layer.down = matrices.add(team, format, hidden, kInner);
            layer.qkv_adapters = adapt(layer.qkv, is_float);
            layer.output_adapters = adapt(layer.output, is_float);
            if (i == 1) layer.gate_up_adapters = adapt(layer.gate_up, is_float);
            layer.down_adapters = adapt(layer.down, is_float);
            layer.attention_norm = layer.mlp_norm = norm.data();
            if (i == 0) layer.qkv_bias = bias.data();
            if (i == 1) layer.q_norm = layer.k_norm = norm.data();
            layers.push_back(layer);
        }
        const int64_t layer_bytes = 2 * heads.kv_heads * heads.head_bytes();
        const std::vector<float> numbers = matrices.numbers(kVocab * hidden);
        Weights embedding = matrices.add(team, format, kVocab, hidden, numbers), head = embedding;
        head.outputs = kVocab - 3;
        Screen screen{};
        if (format == Format::kF32 || format == Format::kBf16) {
            screen_errors.resize(size_t(head.tiles() * kTileOutputs));
            screen_norms.resize(screen_errors.size());
            screen = {matrices.add(team, Format::kInt8, head.outputs, hidden, numbers), screen_errors.data(), screen_norms.data()};
            measure_screen(team, head, screen.weights, screen_errors.data(), screen_norms.data());
        }
        model = {heads, 2, hidden, kInner, embedding, head, screen, norm.data(), cos_sin.data(), 1e-5f, 0.25f,
                 kPages, kPages * 2 * layer_bytes, 2 * layer_bytes, layer_bytes};
    }
};

using Requests = std::vector<std::pair<int32_t, int32_t>>;

// The numbers of one step: requests of (context, rows) on pages of their own. Each row is sampled, or each third one.
// With adapters, the first request has none, the next the first, and so on.
std::vector<int32_t> work_of(const Requests& requests, bool every, int32_t greedy, bool adapted) {
    std::vector<int32_t> tokens, start{0}, context, evicted, counts, pages, samples;
    for (auto [length, rows] : requests) {
        const int32_t page = 4 * int32_t(counts.size());
        for (int32_t row = 0; row < rows; row++) {
            tokens.push_back((length * 7 + row * 13) % kVocab);
            if (every || (start.back() + row) % 3 == 0) samples.push_back(start.back() + row);
        }
        start.push_back(start.back() + rows);
        context.push_back(length);
        evicted.push_back(0);
        counts.push_back((length + kPage - 1) / kPage);
        for (int32_t i = 0; i < counts.back(); i++) pages.push_back(page + i);
    }
    std::vector<int32_t> adapters;
    if (adapted) {
        for (size_t r = 0; r < context.size(); r++) adapters.push_back(int32_t(r % (kAdapters + 1)));
    }
    std::vector<int32_t> work{int32_t(tokens.size()), int32_t(context.size()), int32_t(samples.size()), greedy,
                              int32_t(pages.size()), int32_t(adapters.size())};
    for (const auto& part : {tokens, start, context, evicted, counts, pages, samples, adapters}) {
        work.insert(work.end(), part.begin(), part.end());
    }
    return work;
}

// A chunk of each request, then a token of each; many requests, which threads divide among themselves: the tokens chosen in
// all steps.
std::vector<int32_t> run(const Ops& ops, const Model& model, int threads, bool adapted) {
    Team team(threads);
    Step step(model.model, model.layers.data(), threads, 100);
    std::vector<uint8_t> kv(size_t(model.model.extent_bytes));
    std::vector<int32_t> all;
    Requests crowd;
    for (int32_t i = 0; i < 14; i++) crowd.push_back({7 + i, 7});
    const std::pair<Requests, bool> cases[] = {
        {{{30, 30}, {1, 1}, {48, 48}}, true}, {{{31, 1}, {2, 1}, {49, 1}}, true}, {crowd, true}, {crowd, false}};
    for (const auto& [requests, every] : cases) {
        const int32_t rows = work_of(requests, every, 0, adapted)[2];
        for (int32_t greedy : {rows, rows / 2}) {
            std::vector<int32_t> work = work_of(requests, every, greedy, adapted), tokens(rows, -1), top(2 * rows);
            std::vector<SamplingRow> sampled(rows - greedy);
            std::vector<SampledRow> chosen(rows - greedy);
            std::vector<double> logprobs(2 * rows);
            for (size_t i = 0; i < sampled.size(); i++) {
                sampled[i].temperature = 1;
                sampled[i].top_p = 1;
                sampled[i].seed = i;
                sampled[i].forced = -1;
                sampled[i].top_logprobs = 2;
                sampled[i].repetition = 1;
            }
            const StepSampling sampling{sampled.data(), chosen.data(), top.data(), logprobs.data(), 2};
            step.begin(work.data(), kv.data(), tokens.data(), sampling, kDealtRows);
            team.run([&](int worker) { ops.step(step, team, worker); });
            for (int32_t token : tokens) CHECK(token >= 0 && token < kVocab - 3);
            all.insert(all.end(), tokens.begin(), tokens.end());
        }
    }
    return all;
}

} // namespace

void test_step() {
    on_every_isa([](const Ops& ops) {
        for (Format format : {Format::kF32, Format::kBf16, Format::kInt8, Format::kInt8G32, Format::kU4G32}) {
            for (bool is_float : {false, true}) {
                Model model(format, 10, is_float);
                std::vector<int32_t> alone = run(ops, model, 1, false);
                CHECK(alone == run(ops, model, 3, false));
                std::vector<int32_t> adapted = run(ops, model, 1, true);
                CHECK(adapted != alone);
                CHECK(adapted == run(ops, model, 3, true));
                model.model.screen = {};
                CHECK(alone == run(ops, model, 1, false));
                CHECK(std::adjacent_find(alone.begin(), alone.end(), std::not_equal_to<>()) != alone.end());
            }
        }
        for (Numbers kept : {Numbers::kInt8, Numbers::kE4m3}) {
            for (bool is_float : {false, true}) {
                const Model model(Format::kBf16, 10, is_float, kept);
                CHECK(run(ops, model, 1, false) == run(ops, model, 3, false));
            }
        }
    });
}
