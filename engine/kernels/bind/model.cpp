// LlamaLayer and LlamaModel.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "branchline/kernels/model.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline::kernels {
namespace {

using FloatVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LogitsArg = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PoolArg = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntVector = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LongVector = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LevelArg = std::tuple<IntVector, IntVector, IntVector, IntVector>;
using MatrixArg = std::shared_ptr<Matrix>;

std::vector<float> floats(const FloatVector& values) { return {values.data(), values.data() + values.size()}; }

std::vector<float> floats(const std::optional<FloatVector>& values) {
    return values ? floats(*values) : std::vector<float>();
}

template <typename Array>
auto span_of(const Array& values) {
    return std::span(values.data(), values.size());
}

void init_layer(LlamaLayer* self, const FloatVector& attention_norm, const std::vector<MatrixArg>& qkv,
                const std::optional<FloatVector>& qkv_bias, const std::optional<FloatVector>& q_norm,
                const std::optional<FloatVector>& k_norm, const MatrixArg& out, const std::optional<FloatVector>& out_bias,
                const FloatVector& mlp_norm, const MatrixArg& gate_up, const std::optional<FloatVector>& gate_up_bias,
                const MatrixArg& down, const std::optional<FloatVector>& down_bias) {
    new (self) LlamaLayer{.attention_norm = floats(attention_norm),
                          .qkv = {qkv.begin(), qkv.end()},
                          .qkv_bias = floats(qkv_bias),
                          .q_norm = floats(q_norm),
                          .k_norm = floats(k_norm),
                          .out = out,
                          .out_bias = floats(out_bias),
                          .mlp_norm = floats(mlp_norm),
                          .gate_up = gate_up,
                          .gate_up_bias = floats(gate_up_bias),
                          .down = down,
                          .down_bias = floats(down_bias)};
}

Precision require_precision(const std::string& name) {
    if (name == "int8") return Precision::int8;
    if (name == "exact") return Precision::exact;
    throw std::invalid_argument("precision '" + name + "': expected int8 or exact");
}

void init_model(LlamaModel* self, ThreadPool& pool, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                float rms_norm_eps, const MatrixArg& embedding, const std::vector<LlamaLayer>& layers, const FloatVector& norm,
                const MatrixArg& head, const FloatTable& rope, int page_tokens, const std::string& kv_dtype,
                const std::optional<std::string>& precision, const std::optional<std::string>& isa,
                const std::string& attention_isa) {
    LlamaWeights weights{
        .shape = {.hidden_size = embedding->cols(),
                  .num_heads = num_heads,
                  .num_kv_heads = num_kv_heads,
                  .head_dim = head_dim,
                  .intermediate_size = layers.empty() || layers[0].down == nullptr ? 0 : layers[0].down->cols(),
                  .vocab_size = embedding->rows(),
                  .context_length = static_cast<int64_t>(rope.shape(0)),
                  .rms_norm_eps = rms_norm_eps},
        .embedding = embedding,
        .layers = layers,
        .norm = floats(norm),
        .head = head,
        .rope = {rope.data(), rope.data() + rope.size()}};
    LlamaOptions options;
    options.page_tokens = page_tokens;
    options.kv_type = require_kv_type(kv_dtype);
    options.attention_isa = attention_isa;
    if (precision) options.precision = require_precision(*precision);
    if (isa) options.isa = require_isa(*isa);
    new (self) LlamaModel(std::move(weights), pool, options);
}

void step(LlamaModel& self, const IntVector& token_ids, const IntVector& positions, const IntVector& write_slots,
          const IntVector& row_indptr, const std::vector<LevelArg>& levels, const LongVector& logit_tokens, const PoolArg& kv,
          const LogitsArg& logits) {
    std::vector<AttentionLevel> spans;
    spans.reserve(levels.size());
    for (const auto& [qo_indptr, kv_indptr, kv_indices, last_page_len] : levels) {
        spans.push_back({span_of(qo_indptr), span_of(kv_indptr), span_of(kv_indices), span_of(last_page_len)});
    }
    if (logits.shape(0) != logit_tokens.size() || static_cast<int64_t>(logits.shape(1)) != self.shape().vocab_size) {
        throw std::invalid_argument("logits are " + std::to_string(logits.shape(0)) + " x " + std::to_string(logits.shape(1)) +
                                    ": expected " + std::to_string(logit_tokens.size()) + " x " +
                                    std::to_string(self.shape().vocab_size));
    }
    const int64_t num_pages = static_cast<int64_t>(kv.size()) / self.attention_shape().page_bytes();
    const nb::gil_scoped_release released;
    self.step({.token_ids = span_of(token_ids),
               .positions = span_of(positions),
               .write_slots = span_of(write_slots),
               .row_indptr = span_of(row_indptr),
               .levels = spans,
               .logit_tokens = span_of(logit_tokens)},
              reinterpret_cast<std::byte*>(kv.data()), num_pages, logits.data());
}

}  // namespace

void bind_model(nb::module_& m) {
    nb::class_<LlamaLayer>(m, "LlamaLayer", nb::is_final())
        .def("__init__", &init_layer, nb::kw_only(), "attention_norm"_a, "qkv"_a, "qkv_bias"_a.none(), "q_norm"_a.none(),
             "k_norm"_a.none(), "out"_a, "out_bias"_a.none(), "mlp_norm"_a, "gate_up"_a, "gate_up_bias"_a.none(), "down"_a,
             "down_bias"_a.none());
    nb::class_<LlamaModel>(m, "LlamaModel", nb::is_final())
        .def("__init__", &init_model, "pool"_a, nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "rms_norm_eps"_a,
             "embedding"_a, "layers"_a, "norm"_a, "head"_a, "rope"_a, "page_tokens"_a = 16, "kv_dtype"_a = "bfloat16",
             "precision"_a = nb::none(), "isa"_a = nb::none(), "attention_isa"_a = "", nb::keep_alive<1, 2>())
        .def_prop_ro("nbytes", &LlamaModel::num_bytes)
        .def("step", &step, "token_ids"_a, "positions"_a, "write_slots"_a, "row_indptr"_a, "levels"_a, "logit_tokens"_a, "kv"_a,
             "logits"_a);
}

}  // namespace branchline::kernels
