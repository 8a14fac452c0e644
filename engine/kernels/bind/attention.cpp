#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "branchline/kernels/attention.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline::kernels {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vectors = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const int32_t> span_of(const Ints& array) { return {array.data(), array.size()}; }

/// Of an array [tokens, heads, head_dim] whose token is contiguous. Throws std::invalid_argument.
template <typename Array>
int64_t token_stride(const Array& array, const char* name, int64_t tokens, int64_t heads, int64_t head_dim) {
    const bool is_right = static_cast<int64_t>(array.shape(0)) == tokens && static_cast<int64_t>(array.shape(1)) == heads &&
                          static_cast<int64_t>(array.shape(2)) == head_dim && array.stride(2) == 1 &&
                          (heads == 1 || array.stride(1) == head_dim);
    if (!is_right)
        throw std::invalid_argument(std::string(name) + " must be [" + std::to_string(tokens) + ", " + std::to_string(heads) +
                                    ", " + std::to_string(head_dim) + "] float32, contiguous within a token");
    return array.stride(0);
}

void attend(TreeAttention& self, int layer, const Vectors& q, const Vectors& k, const Vectors& v, const Output& out,
            const Bytes& pool, ThreadPool& threads) {
    const AttentionShape& shape = self.shape();
    const int64_t tokens = self.num_tokens(), head_dim = shape.head_dim;
    const int64_t q_stride = token_stride(q, "q", tokens, shape.num_heads, head_dim);
    const int64_t k_stride = token_stride(k, "k", tokens, shape.num_kv_heads, head_dim);
    if (token_stride(v, "v", tokens, shape.num_kv_heads, head_dim) != k_stride)
        throw std::invalid_argument("k and v must have the same stride from token to token");
    const int64_t out_stride = token_stride(out, "out", tokens, shape.num_heads, head_dim);
    if (static_cast<int64_t>(pool.size()) < self.num_pages() * shape.page_bytes())
        throw std::invalid_argument("the pool has " + std::to_string(pool.size()) + " bytes, the step was planned for " +
                                    std::to_string(self.num_pages()) + " pages of " + std::to_string(shape.page_bytes()));
    nb::gil_scoped_release release;
    self.attend(layer, q.data(), q_stride, k.data(), v.data(), k_stride, out.data(), out_stride,
                reinterpret_cast<std::byte*>(pool.data()), threads);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attention_isas", &attention_isas);
    nb::class_<TreeAttention>(m, "TreeAttention", nb::is_final())
        .def(
            "__init__",
            [](TreeAttention* self, int num_layers, int num_heads, int num_kv_heads, int head_dim, int page_tokens, float scale,
               const std::string& kv_dtype, const std::string& isa) {
                const AttentionShape shape{.num_layers = num_layers,
                                           .num_heads = num_heads,
                                           .num_kv_heads = num_kv_heads,
                                           .head_dim = head_dim,
                                           .page_tokens = page_tokens,
                                           .scale = scale,
                                           .kv_type = require_kv_type(kv_dtype)};
                new (self) TreeAttention(shape, isa);
            },
            nb::kw_only(), "num_layers"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "page_tokens"_a, "scale"_a,
            "kv_dtype"_a, "isa"_a = "")
        .def_prop_ro("isa", &TreeAttention::isa)
        .def_prop_ro("page_bytes", [](const TreeAttention& self) { return self.shape().page_bytes(); })
        .def(
            "plan",
            [](TreeAttention& self, const Ints& write_slots, const Ints& row_indptr,
               const std::vector<std::tuple<Ints, Ints, Ints, Ints>>& levels, int64_t num_pages) {
                std::vector<AttentionLevel> spans;
                spans.reserve(levels.size());
                for (const auto& [qo_indptr, kv_indptr, kv_indices, last_page_len] : levels)
                    spans.push_back({span_of(qo_indptr), span_of(kv_indptr), span_of(kv_indices), span_of(last_page_len)});
                self.plan(span_of(write_slots), span_of(row_indptr), spans, num_pages);
            },
            "write_slots"_a, "row_indptr"_a, "levels"_a, "num_pages"_a)
        .def("attend", &attend, "layer"_a, "q"_a, "k"_a, "v"_a, "out"_a, "pool"_a, "threads"_a);
}

}  // namespace branchline::kernels
