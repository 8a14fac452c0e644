// A whole decoder of the Llama family: one call computes a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "branchline/kernels/attention.hpp"
#include "branchline/kernels/linear.hpp"
#include "branchline/kernels/ops.hpp"
#include "branchline/kernels/thread_pool.hpp"

namespace branchline::kernels {

/// Sizes of the model. `context_length` bounds the positions.
struct LlamaShape {
    int64_t hidden_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t intermediate_size;
    int64_t vocab_size;
    int64_t context_length;
    float rms_norm_eps;

    int64_t q_size() const { return num_heads * head_dim; }
    int64_t kv_size() const { return num_kv_heads * head_dim; }
    int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

using SharedMatrix = std::shared_ptr<const Matrix>;

/// One layer. An empty vector: the model has none.
struct LlamaLayer {
    std::vector<float> attention_norm;  // [hidden_size]
    std::vector<SharedMatrix> qkv;      // one below the other [qkv_size, hidden_size]; several where their formats differ
    std::vector<float> qkv_bias;        // [qkv_size]
    std::vector<float> q_norm, k_norm;  // [head_dim]: of each head, before rope
    SharedMatrix out;                   // [hidden_size, q_size]
    std::vector<float> out_bias;        // [hidden_size]
    std::vector<float> mlp_norm;        // [hidden_size]
    SharedMatrix gate_up;               // [2 · intermediate_size, hidden_size], interleaved halves
    std::vector<float> gate_up_bias;    // [2 · intermediate_size]
    SharedMatrix down;                  // [hidden_size, intermediate_size]
    std::vector<float> down_bias;       // [hidden_size]
};

struct LlamaWeights {
    LlamaShape shape;
    SharedMatrix embedding;          // [vocab_size, hidden_size]
    std::vector<LlamaLayer> layers;  // at least one
    std::vector<float> norm;         // [hidden_size]
    SharedMatrix head;               // [vocab_size, hidden_size]; the same as the embedding if it is tied
    std::vector<float> rope;         // [context_length, head_dim]: cosines of a position's pairs, then their sines
};

/// One step's tokens; see engine/branchline/engine/step.py.
struct LlamaStep {
    std::span<const int32_t> token_ids;    // [T]
    std::span<const int32_t> positions;    // [T]
    std::span<const int32_t> write_slots;  // [T]
    std::span<const int32_t> row_indptr;   // [R + 1]
    std::span<const AttentionLevel> levels;
    std::span<const int64_t> logit_tokens;  // [N]: packed tokens whose logits are wanted
};

/// How a model is computed.
struct LlamaOptions {
    int page_tokens = 16;
    KvType kv_type = KvType::bfloat16;
    std::optional<Precision> precision;  // of the inputs of quantised matrices; none: each matrix's own
    Isa isa = default_isa();
    std::string attention_isa;  // empty: the best; see TreeAttention
};

/// The weights and the scratch memory of the steps. Used by one thread at a time.
///
/// A token's logits depend on its own branch alone: not on the batch that it is computed in, nor on the number of threads.
class LlamaModel {
  public:
    /// `pool` must outlive the model. Throws std::invalid_argument if a size doesn't fit the shape, or if the attention
    /// can't take the shape.
    LlamaModel(LlamaWeights weights, ThreadPool& pool, const LlamaOptions& options = {});

    const LlamaShape& shape() const { return weights_.shape; }
    int64_t num_layers() const { return static_cast<int64_t>(weights_.layers.size()); }
    /// Memory that the matrices take.
    int64_t num_bytes() const;
    const AttentionShape& attention_shape() const { return attention_.shape(); }

    /// Computes all layers of a step: writes its K/V into the pages at `kv` and the wanted logits [N, vocab_size] into
    /// `logits`. Allocates only while steps grow. Throws std::invalid_argument, before it writes anything, if an array's length
    /// or a number in it doesn't fit.
    void step(const LlamaStep& step, std::byte* kv, int64_t num_pages, float* logits);

  private:
    /// Scratch memory of floats that grows to the largest size asked for.
    class Rows {
      public:
        float* grow(int64_t num_floats);
        float* data() { return buffer_.data(); }

      private:
        std::vector<float> buffer_;
    };

    void require_fitting(const LlamaStep& step) const;
    float* gather(const float* x, std::span<const int64_t> tokens, int64_t size, Rows& out);
    void embed(std::span<const int32_t> token_ids);
    void project_qkv(const LlamaLayer& layer, const LlamaStep& step);
    void mlp(const LlamaLayer& layer, float* x, int64_t num_tokens);
    void add_projection(const Matrix& matrix, const std::vector<float>& bias, const float* y, int64_t num_tokens, float* x);
    void norm(const float* x, const std::vector<float>& weight, int64_t num_tokens);
    void assign(const float* x, int64_t num_tokens, const Matrix& matrix);
    Precision precision_of(const Matrix& matrix) const;

    LlamaWeights weights_;
    ThreadPool& pool_;
    std::optional<Precision> precision_;
    Isa isa_;
    const Ops& ops_;
    TreeAttention attention_;
    Activations activations_;
    Rows x_, normed_, qkv_, attended_, wanted_x_, wanted_attended_, gate_up_, gated_;
};

}  // namespace branchline::kernels
