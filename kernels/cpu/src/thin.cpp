#include "thin.h"

#include "half.h"

#include <vector>

namespace headrace {
namespace {

enum class E4m3 : uint8_t {};

inline float number(int8_t a) { return float(a); }
inline float number(E4m3 a) { return widen_e4m3(uint8_t(a)); }

// Words of B tokens into a row of floats for each of their components.
template <int64_t kPerWord, class Number> inline void widen(const Number* words, int64_t tokens, float* to) {
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t part = 0; part < kPerWord; part++) to[part * tokens + t] = number(words[t * kPerWord + part]);
    }
}
template <int64_t kPerWord> inline void widen(const uint16_t* words, int64_t tokens, float* to) {
    for (int64_t t = 0; t < tokens; t++) {
        uint32_t both;
        std::memcpy(&both, words + 2 * t, sizeof both);
        to[t] = same_bits<float>(both << 16);
        to[tokens + t] = same_bits<float>(both & 0xffff0000u);
    }
}
template <int64_t kPerWord> inline void widen(const float* words, int64_t tokens, float* to) {
    std::memcpy(to, words, size_t(tokens) * sizeof(float));
}

// One head of one layer. Tokens are taken a page at a time, as floats [head_size][page_tokens].
template <class Number, int64_t kPerWord> class HeadThinning {
  public:
    HeadThinning(const HeadShape& heads, const ThinWork& work, uint8_t* layer, int64_t head)
        : heads_(heads), work_(work), layer_(layer), head_(head), keys_(size_t(pages() * heads.head_elements())),
          inverse_(size_t(pages() * heads.page_tokens)), scores_(inverse_.size()) {}

    void run() {
        sum_units();
        score();
        keep();
    }

  private:
    int64_t pages() const { return (work_.tokens + heads_.page_tokens - 1) / heads_.page_tokens; }

    // The keys of this head on a page, and its values.
    uint8_t* keys(int64_t page) const { return layer_ + work_.page_offset[page] + head_ * heads_.head_bytes(); }
    uint8_t* values(int64_t page) const { return keys(page) + heads_.kv_heads * heads_.head_bytes(); }
    static Number* numbers(uint8_t* head) { return reinterpret_cast<Number*>(head); }
    // Behind those of a byte.
    float* scales(uint8_t* head) const { return reinterpret_cast<float*>(head + heads_.head_elements()); }

    float* read_keys(int64_t page) { return keys_.data() + page * heads_.head_elements(); }

    // A page's keys as floats, zeros behind the last token: what stands there may be no number.
    void read(int64_t page) {
        const int64_t size = heads_.head_size, tokens = heads_.page_tokens;
        const Number* from = numbers(keys(page));
        float* to = read_keys(page);
        for (int64_t d = 0; d < size; d += kPerWord) widen<kPerWord>(from + d * tokens, tokens, to + d * tokens);
        if (heads_.has_scales()) multiply(to, scales(keys(page)));
        const int64_t there = work_.tokens - page * tokens;
        if (there >= tokens) return;
        for (int64_t d = 0; d < size; d++) std::fill(to + d * tokens + there, to + (d + 1) * tokens, 0.0f);
    }

    void multiply(float* keys, const float* scales) const {
        const int64_t tokens = heads_.page_tokens;
        for (int64_t d = 0; d < heads_.head_size; d++) {
            for (int64_t t = 0; t < tokens; t++) keys[d * tokens + t] *= scales[t];
        }
    }

    // One over each key's length; 0 for a key of zeros.
    void invert_lengths(const float* keys, float* inverse) const {
        const int64_t tokens = heads_.page_tokens;
        for (int64_t d = 0; d < heads_.head_size; d++) {
            const float* row = keys + d * tokens;
            for (int64_t t = 0; t < tokens; t++) inverse[t] += row[t] * row[t];
        }
        for (int64_t t = 0; t < tokens; t++) inverse[t] = inverse[t] > 0 ? 1 / std::sqrt(inverse[t]) : 0.0f;
    }

    // The sum of all keys at length 1, in the order of their tokens. Its own length changes no order of scores.
    void sum_units() {
        const int64_t size = heads_.head_size, tokens = heads_.page_tokens;
        std::vector<float> lanes(size_t(heads_.head_elements()), 0.0f);
        for (int64_t page = 0; page < pages(); page++) {
            read(page);
            const float* keys = read_keys(page);
            float* inverse = inverse_.data() + page * tokens;
            invert_lengths(keys, inverse);
            for (int64_t d = 0; d < size; d++) {
                const float* row = keys + d * tokens;
                float* sums = lanes.data() + d * tokens;
                for (int64_t t = 0; t < tokens; t++) sums[t] += row[t] * inverse[t];
            }
        }
        anchor_.assign(size_t(size), 0.0f);
        for (int64_t d = 0; d < size; d++) {
            for (int64_t t = 0; t < tokens; t++) anchor_[size_t(d)] += lanes[size_t(d * tokens + t)];
        }
    }

    void score() {
        const int64_t tokens = heads_.page_tokens;
        for (int64_t page = 0; page < pages(); page++) {
            const float* inverse = inverse_.data() + page * tokens;
            float* scores = scores_.data() + page * tokens;
            for (int64_t d = 0; d < heads_.head_size; d++) {
                const float* row = read_keys(page) + d * tokens;
                for (int64_t t = 0; t < tokens; t++) scores[t] -= row[t] * anchor_[size_t(d)];
            }
            for (int64_t t = 0; t < tokens; t++) {
                const float score = scores[t] * inverse[t];
                scores[t] = score == score ? score : -std::numeric_limits<float>::infinity(); // NaNs have no order
            }
        }
    }

    // Moves the tokens that are kept together, in their order: none moves to a place behind its own.
    void keep() {
        std::vector<int32_t> middle;
        for (int64_t t = work_.first; t < work_.tokens - work_.last; t++) middle.push_back(int32_t(t));
        const auto wanted = middle.begin() + (work_.kept - work_.first - work_.last);
        std::nth_element(middle.begin(), wanted, middle.end(), [&](int32_t a, int32_t b) {
            const float one = scores_[size_t(a)], other = scores_[size_t(b)];
            return one > other || (one == other && a < b);
        });
        std::sort(middle.begin(), wanted);
        int64_t to = work_.first;
        for (auto token = middle.begin(); token != wanted; token++) move(*token, to++);
        for (int64_t token = work_.tokens - work_.last; token < work_.tokens; token++) move(token, to++);
    }

    void move(int64_t from, int64_t to) {
        if (from == to) return;
        const int64_t size = heads_.head_size, tokens = heads_.page_tokens, n = kPerWord;
        uint8_t *old_keys = keys(from / tokens), *old_values = values(from / tokens);
        uint8_t *new_keys = keys(to / tokens), *new_values = values(to / tokens);
        from %= tokens;
        to %= tokens;
        const Number *key = numbers(old_keys) + from * n, *value = numbers(old_values) + from / n * size * n + from % n;
        Number *key_to = numbers(new_keys) + to * n, *value_to = numbers(new_values) + to / n * size * n + to % n;
        for (int64_t word = 0; word < size / n; word++) {
            std::memcpy(key_to + word * tokens * n, key + word * tokens * n, size_t(n) * sizeof(Number));
        }
        for (int64_t i = 0; i < size; i++) value_to[i * n] = value[i * n];
        if (!heads_.has_scales()) return;
        scales(new_keys)[to] = scales(old_keys)[from];
        scales(new_values)[to] = scales(old_values)[from];
    }

    const HeadShape& heads_;
    const ThinWork& work_;
    uint8_t* layer_;
    const int64_t head_;
    std::vector<float> keys_;    // [pages][head_size][page_tokens]
    std::vector<float> inverse_; // [pages][page_tokens]
    std::vector<float> scores_;  // likewise
    std::vector<float> anchor_;  // [head_size]
};

template <class Number, int64_t kPerWord>
void thin_head(const HeadShape& heads, const ThinWork& work, uint8_t* layer, int64_t head) {
    HeadThinning<Number, kPerWord>(heads, work, layer, head).run();
}

auto thinning_of(const HeadShape& heads) {
    switch (heads.numbers) {
    case Numbers::kInt8: return heads.is_float ? thin_head<int8_t, 1> : thin_head<int8_t, 2>;
    case Numbers::kE4m3: return heads.is_float ? thin_head<E4m3, 1> : thin_head<E4m3, 2>;
    default: return heads.is_float ? thin_head<float, 1> : thin_head<uint16_t, 2>;
    }
}

} // namespace

void thin(Team& team, const HeadShape& heads, const ThinWork& work, uint8_t* arena) {
    const auto thin_one = thinning_of(heads);
    const int64_t parts = work.layers * heads.kv_heads;
    for (int64_t part; (part = team.claim_one()) < parts;) {
        thin_one(heads, work, arena + part / heads.kv_heads * work.layer_bytes, part % heads.kv_heads);
    }
}

} // namespace headrace
