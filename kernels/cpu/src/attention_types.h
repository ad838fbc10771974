// What attention and the writing of keys and values take: plain structs that ctypes fills as well.
//
// Keys and values of one page in one layer stand as one block, `layer.kv + page_offset`. A dot product of bf16 takes
// two neighbours at once, so whatever is reduced stands in pairs: components of a key, tokens of a value. With G key
// heads, D components and B tokens of a page:
//
//   keys    [G][D/2][B][2]   one vector holds two components of W tokens: a share of the scores of W tokens
//   values  [G][B/2][D][2]   one vector holds W components of two tokens: a share of W outputs from two tokens
//
// In float32 a pair is one element: keys [G][D][B], values [G][B][D]. Either way a word has 4 bytes.
//
// Numbers of a byte stand in the same order, and behind those of each head its scales, of one token after the other:
//
//   keys    G times [D/2][B][2] bytes, [B] floats
//   values  G times [B/2][D][2] bytes, [B] floats
#pragma once

#include "base.h"

namespace headrace {

constexpr int64_t kMostHeadSize = 512;
// Pages hold a multiple of this many tokens, so that no vector reaches over a page's end.
constexpr int64_t kPageTokens = 16;

// What pages hold of keys and values: the type that is computed with, or numbers of a byte that have scales.
enum class Numbers : int32_t { kPlain, kInt8, kE4m3 };

// How the heads of every layer are arranged, and the pages that they use.
struct HeadShape {
    int32_t heads;
    int32_t kv_heads;
    int32_t head_size;
    int32_t page_tokens;
    int32_t window_tokens; // that a row sees, itself included; 0: its whole context
    int32_t is_float;      // what is computed with: 1 float32, 0 bf16
    Numbers numbers;       // of keys and values

    int64_t shared() const { return heads / kv_heads; }
    int64_t head_elements() const { return int64_t(head_size) * page_tokens; } // keys (or values) of a head on a page
    bool has_scales() const { return numbers != Numbers::kPlain; }
    // Those of a head on a page as they stand there, with their scales.
    int64_t head_bytes() const {
        if (has_scales()) return head_elements() + page_tokens * int64_t(sizeof(float));
        return head_elements() * (is_float ? 4 : 2);
    }
    // First token that a row at `position` sees.
    int64_t first_visible(int64_t position) const {
        return window_tokens > 0 ? std::max<int64_t>(0, position + 1 - window_tokens) : 0;
    }
};

// Where the rows of one step stand: kernels.protocol.AttentionMetadata with pages as places in memory.
struct StepShape {
    int64_t rows;
    int64_t requests;
    const int32_t* positions;   // [rows] in the sequence: beyond the place in the context if that was thinned
    const int32_t* query_start; // [requests + 1] first row of each request; its rows are the last of its context
    const int32_t* context_len; // [requests] tokens that are kept up to and with the last row
    const int64_t* page_offset; // [requests, pages_per_request] bytes from the arena's start to each page
    int64_t pages_per_request;
};

// One layer's projection on its way to q and to the pages.
struct RotaryLayer {
    const void* qkv; // [rows, heads + 2 kv_heads, head_size] of float32 if `qkv_is_float`, else bf16
    void* q;         // [rows, heads, head_size], turned; may be where qkv is
    uint8_t* kv;     // the arena from where this layer's block of page 0 would begin
    const float* bias;    // [heads + 2 kv_heads, head_size] or null
    const float* q_norm;  // [head_size] or null
    const float* k_norm;  // [head_size] or null
    const float* cos_sin; // [positions, 2, head_size / 2]
    int64_t qkv_stride;   // elements from row to row
    int64_t q_stride;
    float norm_eps;
    int32_t qkv_is_float;
};

struct AttentionLayer {
    const void* q;     // [rows, heads, head_size]
    const uint8_t* kv; // as above
    void* out;         // [rows, heads, head_size] of float32 if `out_is_float`, else bf16
    int64_t q_stride;
    int64_t out_stride;
    float scale;
    int32_t out_is_float;
};

} // namespace headrace
