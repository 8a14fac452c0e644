// Attention over the branch tree, on paged K/V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "branchline/kernels/thread_pool.hpp"

namespace branchline::kernels {

enum class KvType { float32, bfloat16, int8 };

/// "float32", "bfloat16" or "int8". Throws std::invalid_argument.
KvType require_kv_type(const std::string& name);

/// Shapes of a model's attention and of its pool of K/V. `scale` multiplies the logits (usually head_dim ** -0.5).
///
/// A page's bytes are [layers][2: K, V][kv_heads][blocks], a block 16 tokens, so that a page's size is that of
/// [layers, 2, kv_heads, page_tokens, head_dim]. Blocks, float32: K [head_dim][16], V [16][head_dim]. bfloat16, in pairs:
/// K [head_dim / 2][16][2], V [8][head_dim][2]: two dimensions of a token, two tokens of a dimension, the later one first.
/// int8: as float32, then the tokens' scales, float32 [16]: a token's vector is its scale times its codes, and takes
/// head_dim + 4 bytes. (One scale for a page would have to be raised as the page fills, and its codes rounded again: K/V would
/// depend on the steps that they came by.)
struct AttentionShape {
    int num_layers = 0;
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;  // a multiple of 8, at most 512
    int page_tokens = 0;  // a multiple of 16
    float scale = 0.0f;
    KvType kv_type = KvType::float32;

    /// Bytes of one token's K, or V, of one head.
    int64_t token_bytes() const;
    int64_t page_bytes() const;
};

/// One level of the tree: `branchline.engine.step.Level`.
struct AttentionLevel {
    std::span<const int32_t> qo_indptr;
    std::span<const int32_t> kv_indptr;
    std::span<const int32_t> kv_indices;
    std::span<const int32_t> last_page_len;
};

/// The kernels that `attention_isas()` lists: the machine's instruction sets, least demanding first, then "avx512bf16" where
/// the machine multiplies pairs of bfloat16.
std::vector<std::string> attention_isas();

/// Attention of one engine: plan a step, then attend in each of its layers. Used by one thread at a time.
///
/// Each segment's K/V is read once for all the queries below it. A branch is cut into splits of 512 tokens, counted from its
/// first position; their partial softmaxes are merged in that order. A row's result depends on its own query, K and V alone,
/// bit for bit: not on the other rows, the number of threads, or how its K/V is cut into levels and pages, so that a forked
/// branch computes what the same tokens in one sequence would. float32 K/V: products in float32. bfloat16 K/V: the same after
/// widening (int8 likewise) or, on avx512bf16, products of bfloat16 queries and weights, summed in float32.
class TreeAttention {
  public:
    /// `isa`: one of `attention_isas()`; empty: the best that BRANCHLINE_ISA allows.
    /// Throws std::invalid_argument: shapes that it can't take, an unknown or missing instruction set.
    explicit TreeAttention(const AttentionShape& shape, const std::string& isa = "");
    ~TreeAttention();
    TreeAttention(TreeAttention&&) noexcept;

    const AttentionShape& shape() const;
    const std::string& isa() const;

    /// Take a step's arrays; copies what it needs. Allocates only while steps grow.
    /// Throws std::invalid_argument if they contradict each other or name pages outside [0, num_pages).
    void plan(std::span<const int32_t> write_slots, std::span<const int32_t> row_indptr,
              std::span<const AttentionLevel> levels, int64_t num_pages);

    /// Tokens of the planned step, and the pages that its pool must have.
    int64_t num_tokens() const;
    int64_t num_pages() const;

    /// Write the step's K/V of `layer` at its slots of `pool`, then attend. Modifies the pool at those slots only.
    ///
    /// q: [T, num_heads, head_dim], k, v: [T, num_kv_heads, head_dim], out: as q; strides in floats from token to token.
    /// `out` must not overlap the inputs.
    void attend(int layer, const float* q, int64_t q_stride, const float* k, const float* v, int64_t kv_stride, float* out,
                int64_t out_stride, std::byte* pool, ThreadPool& threads);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace branchline::kernels
