#include "step_state.h"

#include <sys/mman.h>

#include <new>

namespace headrace {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kLine = 64;
constexpr int64_t kBestBytes = 8;

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

Activations InputRows::shaped(Format format, int64_t size) const {
    const FormatLayout& layout = layout_of(format);
    int64_t bytes = round_up(size, layout.group_inputs) / layout.step_inputs * 4;
    return {values_.as<uint8_t>(), round_up(bytes, kLine), scales_.as<float>(), offsets_.as<int32_t>()};
}

StepWork::StepWork(const int32_t* work)
    : rows(work[0]), requests(work[1]), samples(work[2]), greedy(work[3]), pages(work[4]) {
    token_ids = work + 5;
    query_start = token_ids + rows;
    context_len = query_start + requests + 1;
    page_count = context_len + requests;
    page_ids = page_count + requests;
    sample_rows = page_ids + pages;
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
    for (int worker = 0; worker < threads; worker++) own_inputs.emplace_back(kOwnRows, widest);
}

void Step::begin(const int32_t* numbers, uint8_t* arena, int32_t* chosen, const StepSampling& rows) {
    work = StepWork(numbers);
    kv = arena;
    tokens = chosen;
    sampling = rows;
    int64_t most_pages = 0;
    for (int64_t r = 0; r < work.requests; r++) most_pages = std::max<int64_t>(most_pages, work.page_count[r]);
    positions_.resize(size_t(work.rows));
    page_offset_.resize(size_t(work.requests * most_pages));
    const int32_t* page = work.page_ids;
    for (int64_t r = 0; r < work.requests; r++) {
        int32_t position = work.context_len[r] - (work.query_start[r + 1] - work.query_start[r]);
        for (int32_t row = work.query_start[r]; row < work.query_start[r + 1]; row++) positions_[row] = position++;
        for (int32_t i = 0; i < work.page_count[r]; i++)
            page_offset_[r * most_pages + i] = model.page_offset(*page++);
    }
    shape = {work.rows, work.requests, positions_.data(), work.query_start, work.context_len, page_offset_.data(), most_pages};
    plan.make(shape, model.heads, threads);
    list_read_pages();
    sampled_rows_.assign(work.sample_rows, work.sample_rows + work.samples);
    std::sort(sampled_rows_.begin(), sampled_rows_.end());
    sampled_rows_.erase(std::unique(sampled_rows_.begin(), sampled_rows_.end()), sampled_rows_.end());
}

void Step::list_read_pages() {
    read_pages_.clear();
    const int32_t* page = work.page_ids;
    for (int64_t r = 0; r < work.requests; page += work.page_count[r++]) {
        const int64_t position = work.context_len[r] - (work.query_start[r + 1] - work.query_start[r]);
        const int64_t first = model.heads.first_visible(position) / model.heads.page_tokens;
        const int64_t end = (work.context_len[r] - 1) / model.heads.page_tokens + 1;
        for (int64_t i = first; i < end; i++) read_pages_.push_back(model.page_offset(page[i]));
    }
    std::sort(read_pages_.begin(), read_pages_.end());
    read_pages_.erase(std::unique(read_pages_.begin(), read_pages_.end()), read_pages_.end());
}

} // namespace headrace
