// What is compiled once per instruction set for tree attention. Included by those sources: no standard library in here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace branchline::kernels {

/// The attention of some query tokens to a run of K/V, in one layer and one kv head.
///
/// Rows are (query token, query head of the kv head), token first. A run lies in consecutive blocks of a segment, a block 16
/// tokens of K or V of this head and layer. Its tokens are counted from the beginning of its first block, and go from `begin`
/// to before `end`: row r of token i = r / group sees those before first_limit + i. At least one row sees at least one.
struct AttentionUnit {
    const float* q;  // the first token's first query head of this kv head
    int64_t q_stride;  // floats from token to token
    const std::byte* keys;  // where page 0 would have this head's K of this layer
    const std::byte* values;
    int64_t page_bytes;
    const int32_t* pages;  // the table of the whole segment
    int32_t blocks_per_page;
    int32_t first_block;  // of the run, in the segment
    int32_t num_blocks;  // of the whole segment
    int32_t num_queries;  // tokens
    int32_t group;  // query heads per kv head
    int32_t head_dim;
    int32_t begin;  // below 16
    int32_t end;
    int32_t first_limit;
    int32_t phase;  // the position, modulo 16, of a block's first token
    bool continues;  // the partial results are of the tokens before the run, and go on
    bool goes_on;  // another unit will continue them: lane_sums are wanted
    float scale;  // to logits of base 2
    float* out;  // [num_queries, …, group, head_dim]: unnormalised
    int64_t out_stride;  // floats from token to token
    float* max;  // [num_queries, …, group]: each row's largest logit, base 2, rounded to a whole number
    float* sum;  // the same: its sum of exp2(logit - max)
    float* lane_sums;  // [num_queries, …, group, 16]: the same of each position modulo 16
    int64_t stat_stride;  // of max and sum, from token to token
};

/// The partial results of one token, of all its heads.
struct AttentionMerge {
    const float* partials;  // [slots, num_heads, head_dim]
    const float* max;  // [slots, num_heads]
    const float* sum;
    const int32_t* slots;
    int32_t num_slots;
    int32_t num_heads;
    int32_t head_dim;
    float* out;  // [num_heads, head_dim]
};

struct AttentionKernels {
    void (*attend_float32)(const AttentionUnit&);
    void (*attend_bfloat16)(const AttentionUnit&);
    void (*attend_int8)(const AttentionUnit&);
    void (*merge)(const AttentionMerge&);
};

namespace baseline {
extern const AttentionKernels kAttention;
}
namespace avx2 {
extern const AttentionKernels kAttention;
}
namespace avx512 {
extern const AttentionKernels kAttention;
}
namespace avx512bf16 {
extern const AttentionKernels kAttention;
}
namespace dotprod {
extern const AttentionKernels kAttention;
}

/// Largest head_dim.
constexpr int kMaxHeadDim = 512;

}  // namespace branchline::kernels
