#include "step_state.h"

#include <sys/mman.h>

#include <iterator>
#include <new>

namespace headrace {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kLine = 64;
constexpr int64_t kBestBytes = 8;
constexpr int64_t kNormsBytes = 8;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t element_bytes(const HeadShape& heads) { return heads.is_float ? sizeof(float) : sizeof(uint16_t); }

} // namespace

Memory::Memory(int64_t bytes) {
    size_t size = size_t(round_up(std::max<int64_t>(bytes, 1), bytes < kHugePage ? kPage : kHugePage));
    void* begin = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (bytes >= kHugePage) madvise(begin, size, MADV_HUGEPAGE);
#endif
    begin_ = {static_cast<uint8_t*>(begin), Unmap{size}};
}

void Unmap::operator()(uint8_t* begin) const { munmap(begin, bytes); }

InputRows::InputRows(int64_t rows, int64_t widest)
    : widest_(round_up(widest, kLine)),
      values_(rows * widest_ * int64_t(sizeof(float))),
      scales_(rows * widest_ / 32 * int64_t(sizeof(float))),
      offsets_(rows * widest_ / 32 * int64_t(sizeof(int32_t))) {}

Activations InputRows::shaped(Format format, int64_t size, int64_t first) const {
    const FormatLayout& layout = layout_of(format);
    int64_t bytes = round_up(size, layout.group_inputs) / layout.step_inputs * 4;
    const int64_t groups = first * widest_ / 32;
    return {values_.as<uint8_t>() + first * widest_ * int64_t(sizeof(float)), round_up(bytes, kLine),
            scales_.as<float>() + groups, offsets_.as<int32_t>() + groups};
}

Step::Step(const StepModel& model, const StepLayer* layers, int threads, int64_t most_rows)
    : model(model), layers(layers, layers + model.layers), threads(threads),
      best_stride(round_up(most_rows, kLine / kBestBytes)) {
    const HeadShape& heads = model.heads;
    const int64_t projected = (heads.heads + 2 * heads.kv_heads) * heads.head_size;
    const int64_t queries = heads.heads * heads.head_size;
    const int64_t widest = std::max({model.hidden, model.inner, queries});
    residual = Memory(most_rows * model.hidden * int64_t(sizeof(float)));
    qkv = Memory(most_rows * projected * int64_t(sizeof(float)));
    attended = Memory(most_rows * queries * element_bytes(heads));
    gated = Memory(most_rows * model.inner * element_bytes(heads));
    logits = Memory(kLogitRows * model.head.outputs * int64_t(sizeof(float)));
    best = Memory(threads * best_stride * kBestBytes);
    sampling_ = Memory(threads * SamplingScratch::bytes(model.head.outputs));
    inputs = InputRows(most_rows, widest);
    head_inputs = InputRows(most_rows, model.hidden);
    rounded = InputRows(most_rows, model.hidden);
    most = Memory(most_rows * model.head.tiles() * int64_t(sizeof(float)));
    least = Memory(most_rows * int64_t(sizeof(float)));
    exact_best = Memory(threads * best_stride * kBestBytes);
    norms = Memory(threads * best_stride * kNormsBytes);
    for (const StepLayer& layer : this->layers) {
        for (const Adapters* each :
             {&layer.qkv_adapters, &layer.output_adapters, &layer.gate_up_adapters, &layer.down_adapters}) {
            if (each->shrink) most_low_ = std::max(most_low_, each->low);
        }
    }
    if (most_low_ > 0) {
        widest_ = round_up(widest, kLine / int64_t(sizeof(float)));
        low_ = Memory(most_rows * most_low_ * int64_t(sizeof(float)));
        own_low_ = Memory(threads * kOwnRows * most_low_ * int64_t(sizeof(float)));
        wide_rows_ = Memory(threads * widest_ * int64_t(sizeof(float)));
    }
    for (int worker = 0; worker < threads; worker++) {
        own_inputs.emplace_back(kOwnRows, widest);
        own_rounded.emplace_back(kOwnRows, model.hidden);
        alone.push_back(std::make_unique<Team>(1));
    }
    shares = std::vector<StepShare>(size_t(threads));
}

void Step::begin(const int32_t* numbers, uint8_t* arena, int32_t* chosen, const StepSampling& rows, int64_t dealt_rows) {
    work = StepWork(numbers);
    kv = arena;
    tokens = chosen;
    sampling = rows;
    shares_used = divide(dealt_rows) ? threads : 1;
    most_pages_ = 0;
    for (int64_t r = 0; r < work.requests; r++) most_pages_ = std::max<int64_t>(most_pages_, work.page_count[r]);
    positions_.resize(size_t(work.rows));
    page_offset_.resize(size_t(work.requests * most_pages_));
    const int32_t* page = work.page_ids;
    for (int64_t r = 0; r < work.requests; r++) {
        int32_t position = work.context_len[r] + work.evicted[r] - int32_t(work.rows_of(r));
        for (int32_t row = work.query_start[r]; row < work.query_start[r + 1]; row++) positions_[size_t(row)] = position++;
        for (int32_t i = 0; i < work.page_count[r]; i++) {
            page_offset_[size_t(r * most_pages_ + i)] = model.page_offset(*page++);
        }
    }
    adapter_of_row.clear();
    for (int64_t r = 0; r < work.adapted; r++) {
        adapter_of_row.insert(adapter_of_row.end(), size_t(work.rows_of(r)), work.adapters[r]);
    }
    sample_row_.resize(size_t(work.samples));
    order_.clear();
    for (int i = 0; i < shares_used; i++) {
        if (shares_used == 1) {
            fill(shares[0], 0, work.requests, threads);
        } else {
            fill(shares[size_t(i)], deal_.first(i), deal_.first(i + 1), 1);
        }
    }
    for (int64_t s = work.greedy; s < work.samples; s++) order_.push_back(s);
}

// Whether each worker computes requests of its own; then `work` has them in that order.
bool Step::divide(int64_t dealt_rows) {
    if (threads == 1 || work.rows < dealt_rows * threads) return false;
    const StepLayer& layer = layers.front();
    double row_ops = 0;
    for (const Weights* weights : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        row_ops += 2.0 * double(weights->outputs * weights->inputs);
    }
    if (!deal_.make(work, model, row_ops, threads)) return false;
    work = deal_.work();
    return true;
}

void Step::fill(StepShare& share, int64_t first, int64_t end, int workers) {
    share.begin = work.query_start[first];
    share.end = work.query_start[end];
    share.shape = {work.rows, end - first, positions_.data(), work.query_start + first, work.context_len + first,
                   page_offset_.data() + first * most_pages_, most_pages_};
    share.plan.make(share.shape, model.heads, workers);

    share.pages.clear();
    for (int64_t r = first; r < end; r++) {
        const int64_t position = work.context_len[r] - work.rows_of(r);
        const int64_t begin = model.heads.first_visible(position) / model.heads.page_tokens;
        const int64_t stop = (work.context_len[r] - 1) / model.heads.page_tokens + 1;
        const int64_t* pages = page_offset_.data() + r * most_pages_;
        share.pages.insert(share.pages.end(), pages + begin, pages + stop);
    }
    std::sort(share.pages.begin(), share.pages.end());
    share.pages.erase(std::unique(share.pages.begin(), share.pages.end()), share.pages.end());

    share.kept.clear();
    const auto is_mine = [&](int32_t row) { return row >= share.begin && row < share.end; };
    std::copy_if(work.sample_rows, work.sample_rows + work.samples, std::back_inserter(share.kept), is_mine);
    std::sort(share.kept.begin(), share.kept.end());
    share.kept.erase(std::unique(share.kept.begin(), share.kept.end()), share.kept.end());
    for (int64_t s = 0; s < work.samples; s++) {
        const int32_t row = work.sample_rows[s];
        if (!is_mine(row)) continue;
        const auto place = std::lower_bound(share.kept.begin(), share.kept.end(), row) - share.kept.begin();
        sample_row_[size_t(s)] = share.begin + place;
    }
    share.greedy.begin = int64_t(order_.size());
    for (int64_t s = 0; s < work.greedy; s++) {
        if (is_mine(work.sample_rows[s])) order_.push_back(s);
    }
    share.greedy.end = int64_t(order_.size());
    share.ready_before = share.ready.value();
}

} // namespace headrace
