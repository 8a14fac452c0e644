#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "branchline/kernels/sampling.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline::kernels {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<T> span_of(const Vector<T>& array) {
    return {array.data(), array.size()};
}

void sample_rows(const Logits& logits, const Vector<const float>& temperature, const Vector<const int64_t>& top_k,
                 const Vector<const float>& top_p, const Vector<const float>& min_p, const Vector<const uint64_t>& keys,
                 const Vector<const int64_t>& positions, const Vector<int32_t>& tokens, const Vector<bool>& is_bad,
                 ThreadPool& pool) {
    if (logits.shape(0) != tokens.size() || logits.shape(1) == 0)
        throw std::invalid_argument("logits are " + std::to_string(logits.shape(0)) + " x " + std::to_string(logits.shape(1)) +
                                    ": expected " + std::to_string(tokens.size()) + " rows of at least one");
    const nb::gil_scoped_release released;
    sample(logits.data(), static_cast<int64_t>(logits.shape(1)),
           {span_of(temperature), span_of(top_k), span_of(top_p), span_of(min_p), span_of(keys), span_of(positions)},
           span_of(tokens), span_of(is_bad), pool);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("sample", &sample_rows, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "keys"_a, "positions"_a,
          "tokens"_a, "is_bad"_a, "pool"_a);
}

}  // namespace branchline::kernels
