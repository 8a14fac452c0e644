#include "branchline/kernels/model.hpp"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace branchline::kernels {
namespace {

void require(bool holds, const char* what, int64_t found, int64_t expected) {
    if (holds) return;
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(found) + ": expected " + std::to_string(expected));
}

void require_size(const std::vector<float>& values, int64_t expected, const char* what, bool may_be_empty = false) {
    const auto size = static_cast<int64_t>(values.size());
    require(size == expected || (may_be_empty && size == 0), what, size, expected);
}

void require_matrix(const SharedMatrix& matrix, int64_t rows, int64_t cols, const char* what) {
    if (matrix == nullptr) throw std::invalid_argument(std::string(what) + " is missing");
    if (matrix->rows() == rows && matrix->cols() == cols) return;
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(matrix->rows()) + " rows of " +
                                std::to_string(matrix->cols()) + ": expected " + std::to_string(rows) + " of " +
                                std::to_string(cols));
}

void require_fitting(const LlamaLayer& layer, const LlamaShape& shape) {
    require_size(layer.attention_norm, shape.hidden_size, "the size of attention_norm");
    int64_t qkv_rows = 0;
    for (const SharedMatrix& part : layer.qkv) {
        require_matrix(part, part == nullptr ? 0 : part->rows(), shape.hidden_size, "a part of qkv");
        qkv_rows += part->rows();
    }
    require(qkv_rows == shape.qkv_size(), "the rows of qkv", qkv_rows, shape.qkv_size());
    require_size(layer.qkv_bias, shape.qkv_size(), "the size of qkv_bias", true);
    require_size(layer.q_norm, shape.head_dim, "the size of q_norm", true);
    require_size(layer.k_norm, shape.head_dim, "the size of k_norm", true);
    require(layer.q_norm.empty() == layer.k_norm.empty(), "the size of k_norm", static_cast<int64_t>(layer.k_norm.size()),
            static_cast<int64_t>(layer.q_norm.size()));
    require_matrix(layer.out, shape.hidden_size, shape.q_size(), "out");
    require_size(layer.out_bias, shape.hidden_size, "the size of out_bias", true);
    require_size(layer.mlp_norm, shape.hidden_size, "the size of mlp_norm");
    require_matrix(layer.gate_up, 2 * shape.intermediate_size, shape.hidden_size, "gate_up");
    if (!layer.gate_up->has_interleaved_halves()) throw std::invalid_argument("gate_up has no interleaved halves");
    require_size(layer.gate_up_bias, 2 * shape.intermediate_size, "the size of gate_up_bias", true);
    require_matrix(layer.down, shape.hidden_size, shape.intermediate_size, "down");
    require_size(layer.down_bias, shape.hidden_size, "the size of down_bias", true);
}

LlamaWeights checked(LlamaWeights weights) {
    const LlamaShape& shape = weights.shape;
    const int64_t sizes[] = {shape.hidden_size,       shape.num_heads,  shape.num_kv_heads,  shape.head_dim,
                             shape.intermediate_size, shape.vocab_size, shape.context_length};
    for (const int64_t size : sizes) require(size >= 1, "a size of the model", size, 1);
    require(shape.num_heads % shape.num_kv_heads == 0, "the remainder of query heads shared out over key/value heads",
            shape.num_heads % shape.num_kv_heads, 0);
    require(shape.head_dim % 2 == 0, "the remainder of head_dim by 2", shape.head_dim % 2, 0);
    require_matrix(weights.embedding, shape.vocab_size, shape.hidden_size, "embedding");
    require_matrix(weights.head, shape.vocab_size, shape.hidden_size, "head");
    require_size(weights.norm, shape.hidden_size, "the size of norm");
    require_size(weights.rope, shape.context_length * shape.head_dim, "the size of the rope table");
    if (weights.layers.empty()) throw std::invalid_argument("the model has no layer");
    for (const LlamaLayer& layer : weights.layers) require_fitting(layer, shape);
    return weights;
}

AttentionShape attention_shape_of(const LlamaWeights& weights, const LlamaOptions& options) {
    const LlamaShape& shape = weights.shape;
    return {.num_layers = static_cast<int>(weights.layers.size()),
            .num_heads = static_cast<int>(shape.num_heads),
            .num_kv_heads = static_cast<int>(shape.num_kv_heads),
            .head_dim = static_cast<int>(shape.head_dim),
            .page_tokens = options.page_tokens,
            .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
            .kv_type = options.kv_type};
}

void require_within(std::span<const int32_t> values, int64_t bound, const char* what) {
    for (const int32_t value : values) {
        if (value >= 0 && value < bound) continue;
        throw std::invalid_argument(std::string(what) + " " + std::to_string(value) + ": expected 0 to " +
                                    std::to_string(bound - 1));
    }
}

}  // namespace

float* LlamaModel::Rows::grow(int64_t num_floats) {
    if (num_floats > std::ssize(buffer_)) buffer_ = std::vector<float>(static_cast<std::size_t>(num_floats));
    return data();
}

LlamaModel::LlamaModel(LlamaWeights weights, ThreadPool& pool, const LlamaOptions& options)
    : weights_(checked(std::move(weights))),
      pool_(pool),
      precision_(options.precision),
      isa_(options.isa),
      ops_(ops(options.isa)),
      attention_(attention_shape_of(weights_, options), options.attention_isa) {}

int64_t LlamaModel::num_bytes() const {
    int64_t bytes = weights_.embedding->num_bytes() + (weights_.head == weights_.embedding ? 0 : weights_.head->num_bytes());
    for (const LlamaLayer& layer : weights_.layers) {
        for (const SharedMatrix& part : layer.qkv) bytes += part->num_bytes();
        bytes += layer.out->num_bytes() + layer.gate_up->num_bytes() + layer.down->num_bytes();
    }
    return bytes;
}

Precision LlamaModel::precision_of(const Matrix& matrix) const {
    return matrix.precision() == Precision::int8 && precision_ ? *precision_ : matrix.precision();
}

void LlamaModel::assign(const float* x, int64_t num_tokens, const Matrix& matrix) {
    activations_.assign(x, num_tokens, matrix.cols(), matrix.cols(), precision_of(matrix), pool_, isa_);
}

void LlamaModel::norm(const float* x, const std::vector<float>& weight, int64_t num_tokens) {
    const int64_t size = weights_.shape.hidden_size;
    float* const out = normed_.grow(num_tokens * size);
    pool_.parallel_for(num_tokens, [&](int64_t t) {
        ops_.rms_norm(x + t * size, weight.data(), weights_.shape.rms_norm_eps, size, out + t * size);
    });
}

void LlamaModel::embed(std::span<const int32_t> token_ids) {
    const int64_t size = weights_.shape.hidden_size;
    const auto num_tokens = static_cast<int64_t>(token_ids.size());
    float* const x = x_.grow(num_tokens * size);
    pool_.parallel_for(num_tokens,
                       [&](int64_t t) { weights_.embedding->row(token_ids[static_cast<std::size_t>(t)], x + t * size); });
}

void LlamaModel::project_qkv(const LlamaLayer& layer, const LlamaStep& step) {
    const LlamaShape& shape = weights_.shape;
    const auto num_tokens = static_cast<int64_t>(step.token_ids.size());
    const int64_t stride = shape.qkv_size();
    float* const qkv = qkv_.grow(num_tokens * stride);
    norm(x_.data(), layer.attention_norm, num_tokens);
    int64_t first_row = 0;
    for (const SharedMatrix& part : layer.qkv) {
        if (first_row == 0 || activations_.precision() != precision_of(*part)) assign(normed_.data(), num_tokens, *part);
        multiply(*part, activations_, qkv + first_row, stride, pool_, Epilogue::store, isa_);
        first_row += part->rows();
    }
    pool_.parallel_for(num_tokens, [&](int64_t t) {
        float* const q = qkv + t * stride;
        float* const k = q + shape.q_size();
        if (!layer.qkv_bias.empty()) ops_.add(layer.qkv_bias.data(), stride, q);
        if (!layer.q_norm.empty()) {
            const int64_t size = shape.head_dim;
            for (float* head = q; head != k; head += size) {
                ops_.rms_norm(head, layer.q_norm.data(), shape.rms_norm_eps, size, head);
            }
            for (float* head = k; head != k + shape.kv_size(); head += size) {
                ops_.rms_norm(head, layer.k_norm.data(), shape.rms_norm_eps, size, head);
            }
        }
        const float* const factors = weights_.rope.data() + step.positions[static_cast<std::size_t>(t)] * shape.head_dim;
        ops_.rope(factors, shape.num_heads + shape.num_kv_heads, shape.head_dim, q);
    });
}

void LlamaModel::add_projection(const Matrix& matrix, const std::vector<float>& bias, const float* y, int64_t num_tokens,
                                float* x) {
    const int64_t size = weights_.shape.hidden_size;
    assign(y, num_tokens, matrix);
    multiply(matrix, activations_, x, size, pool_, Epilogue::add, isa_);
    if (bias.empty()) return;
    pool_.parallel_for(num_tokens, [&](int64_t t) { ops_.add(bias.data(), size, x + t * size); });
}

void LlamaModel::mlp(const LlamaLayer& layer, float* x, int64_t num_tokens) {
    const int64_t size = weights_.shape.intermediate_size;
    norm(x, layer.mlp_norm, num_tokens);
    assign(normed_.data(), num_tokens, *layer.gate_up);
    if (layer.gate_up_bias.empty()) {
        float* const gated = gated_.grow(num_tokens * size);
        multiply(*layer.gate_up, activations_, gated, size, pool_, Epilogue::silu_gate, isa_);
        add_projection(*layer.down, layer.down_bias, gated, num_tokens, x);
        return;
    }
    float* const both = gate_up_.grow(num_tokens * size * 2);
    float* const gated = gated_.grow(num_tokens * size);
    multiply(*layer.gate_up, activations_, both, 2 * size, pool_, Epilogue::store, isa_);
    pool_.parallel_for(num_tokens, [&](int64_t t) {
        float* const row = both + t * 2 * size;
        ops_.add(layer.gate_up_bias.data(), 2 * size, row);
        ops_.silu_gate(row, row + size, size, gated + t * size);
    });
    add_projection(*layer.down, layer.down_bias, gated, num_tokens, x);
}

void LlamaModel::require_fitting(const LlamaStep& step) const {
    const auto num_tokens = static_cast<int64_t>(step.token_ids.size());
    require(num_tokens >= 1, "the number of tokens", num_tokens, 1);
    require(std::ssize(step.positions) == num_tokens, "the number of positions", std::ssize(step.positions), num_tokens);
    require(std::ssize(step.write_slots) == num_tokens, "the number of slots", std::ssize(step.write_slots), num_tokens);
    require_within(step.token_ids, weights_.shape.vocab_size, "token id");
    require_within(step.positions, weights_.shape.context_length, "position");
    for (const int64_t token : step.logit_tokens) {
        require(token >= 0 && token < num_tokens, "an index of a wanted token", token, num_tokens - 1);
    }
}

float* LlamaModel::gather(const float* x, std::span<const int64_t> tokens, int64_t size, Rows& out) {
    float* const rows = out.grow(std::ssize(tokens) * size);
    float* to = rows;
    for (const int64_t token : tokens) {
        std::memcpy(to, x + token * size, static_cast<std::size_t>(size) * sizeof(float));
        to += size;
    }
    return rows;
}

void LlamaModel::step(const LlamaStep& step, std::byte* kv, int64_t num_pages, float* logits) {
    const LlamaShape& shape = weights_.shape;
    require_fitting(step);
    const auto num_tokens = static_cast<int64_t>(step.token_ids.size());
    const auto num_wanted = static_cast<int64_t>(step.logit_tokens.size());
    attention_.plan(step.write_slots, step.row_indptr, step.levels, num_pages);
    embed(step.token_ids);
    float* x = x_.data();
    int64_t num_rows = num_tokens;
    for (int64_t index = 0; index < num_layers(); ++index) {
        const LlamaLayer& layer = weights_.layers[static_cast<std::size_t>(index)];
        const bool is_last = index + 1 == num_layers();
        project_qkv(layer, step);
        const float* const q = qkv_.data();
        const float* const k = q + shape.q_size();
        const float* attended = attended_.grow(num_tokens * shape.q_size());
        attention_.attend(static_cast<int>(index), q, shape.qkv_size(), k, k + shape.kv_size(), shape.qkv_size(),
                          attended_.data(), shape.q_size(), kv, pool_);
        if (is_last && num_wanted == 0) return;
        if (is_last) {  // the K/V are written; from here on only the wanted tokens matter
            attended = gather(attended, step.logit_tokens, shape.q_size(), wanted_attended_);
            x = gather(x, step.logit_tokens, shape.hidden_size, wanted_x_);
            num_rows = num_wanted;
        }
        add_projection(*layer.out, layer.out_bias, attended, num_rows, x);
        mlp(layer, x, num_rows);
    }
    norm(x, weights_.norm, num_wanted);
    assign(normed_.data(), num_wanted, *weights_.head);
    multiply(*weights_.head, activations_, logits, shape.vocab_size, pool_, Epilogue::store, isa_);
}

}  // namespace branchline::kernels
