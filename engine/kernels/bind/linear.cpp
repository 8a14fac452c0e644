// ThreadPool, Matrix and the choice of the instruction set.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "bindings.hpp"
#include "branchline/kernels/isa.hpp"
#include "branchline/kernels/linear.hpp"
#include "branchline/kernels/memory.hpp"
#include "branchline/kernels/quantise.hpp"
#include "branchline/kernels/thread_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline::kernels {
namespace {

using BytesArg = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsArg = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using FloatVector = nb::ndarray<nb::numpy, float, nb::ndim<1>>;

std::unique_ptr<float[]> new_floats(int64_t count) {
    return std::unique_ptr<float[]>(new float[static_cast<std::size_t>(count)]);
}

template <typename Array>
Array owned(std::unique_ptr<float[]> data, std::initializer_list<std::size_t> shape) {
    nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Array(data.release(), shape, owner);
}

Precision require_precision(const std::string& name) {
    if (name == "int8") return Precision::int8;
    if (name == "exact") return Precision::exact;
    throw std::invalid_argument("precision '" + name + "': expected int8 or exact");
}

Epilogue require_epilogue(const std::string& name) {
    if (name == "store") return Epilogue::store;
    if (name == "add") return Epilogue::add;
    if (name == "silu_gate") return Epilogue::silu_gate;
    throw std::invalid_argument("epilogue '" + name + "': expected store, add or silu_gate");
}

Matrix pack(const std::string& format, const std::vector<BytesArg>& parts, int64_t cols, bool interleave_halves,
            Arena* arena) {
    std::vector<std::span<const uint8_t>> spans;
    for (const BytesArg& part : parts) spans.emplace_back(part.data(), part.size());
    const nb::gil_scoped_release released;
    return Matrix::pack(require_format(format), spans, cols, interleave_halves, arena);
}

std::unique_ptr<Arena> map_arena(const std::string& path, std::size_t nbytes) {
    try {
        return std::make_unique<Arena>(path, nbytes);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw nb::python_error();
    }
}

void write_blocks(const Arena& self, const nb::callable& write) {
    for (const std::span<const std::byte> block : self.blocks()) {
        const auto size = static_cast<Py_ssize_t>(block.size());
        // Lent for the call: the arena holds the memory.
        write(nb::steal(PyMemoryView_FromMemory(const_cast<char*>(reinterpret_cast<const char*>(block.data())), size, PyBUF_READ)));
    }
}

FloatMatrix multiply_rows(const Matrix& self, const FloatsArg& x, ThreadPool& pool, const std::string& epilogue,
                          const std::optional<FloatsArg>& onto, const std::optional<std::string>& precision,
                          const std::optional<std::string>& isa) {
    const auto tokens = static_cast<int64_t>(x.shape(0));
    const Epilogue how = require_epilogue(epilogue);
    const Precision with = precision ? require_precision(*precision) : self.precision();
    const Isa set = isa ? require_isa(*isa) : default_isa();
    const int64_t columns = how == Epilogue::silu_gate ? self.rows() / 2 : self.rows();
    const int64_t count = tokens * columns;
    if ((how == Epilogue::add) != onto.has_value()) {
        throw std::invalid_argument("the epilogue add, and no other, needs `onto`");
    }
    if (onto && (static_cast<int64_t>(onto->shape(0)) != tokens || static_cast<int64_t>(onto->shape(1)) != columns)) {
        throw std::invalid_argument("onto is " + std::to_string(onto->shape(0)) + " x " + std::to_string(onto->shape(1)) +
                                    ": expected " + std::to_string(tokens) + " x " + std::to_string(columns));
    }
    std::unique_ptr<float[]> y = new_floats(count);
    {
        const nb::gil_scoped_release released;
        if (onto) std::copy_n(onto->data(), count, y.get());
        Activations activations;
        activations.assign(x.data(), tokens, static_cast<int64_t>(x.shape(1)), static_cast<int64_t>(x.shape(1)), with, pool, set);
        multiply(self, activations, y.get(), columns, pool, how, set);
    }
    return owned<FloatMatrix>(std::move(y), {static_cast<std::size_t>(tokens), static_cast<std::size_t>(columns)});
}

FloatMatrix dequantize(const Matrix& self) {
    std::unique_ptr<float[]> out = new_floats(self.rows() * self.cols());
    {
        const nb::gil_scoped_release released;
        for (int64_t r = 0; r < self.rows(); ++r) self.row(r, out.get() + r * self.cols());
    }
    return owned<FloatMatrix>(std::move(out), {static_cast<std::size_t>(self.rows()), static_cast<std::size_t>(self.cols())});
}

FloatVector row(const Matrix& self, int64_t index) {
    std::unique_ptr<float[]> out = new_floats(self.cols());
    self.row(index, out.get());
    return owned<FloatVector>(std::move(out), {static_cast<std::size_t>(self.cols())});
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.def("isa", [] { return std::string(name(default_isa())); });
    m.def("available_isas", [] {
        std::vector<std::string> out;
        for (const Isa isa : available_isas()) out.emplace_back(name(isa));
        return out;
    });
    nb::class_<ThreadPool>(m, "ThreadPool", nb::is_final())
        .def(nb::init<int>(), "num_threads"_a)
        .def_prop_ro("num_threads", &ThreadPool::num_threads);
    nb::class_<Arena>(m, "Arena", nb::is_final())
        .def(nb::init<>())
        .def_static("mapped", &map_arena, "path"_a, "nbytes"_a)
        .def_prop_ro("nbytes", &Arena::num_bytes)
        .def_prop_ro("is_filled", &Arena::is_filled)
        .def("write_to", &write_blocks, "write"_a);
    nb::class_<Matrix>(m, "Matrix", nb::is_final())
        .def_static("pack", &pack, "format"_a, "parts"_a, "cols"_a, "interleave_halves"_a = false,
                    "arena"_a = nb::none())
        .def("multiply", &multiply_rows, "x"_a, "pool"_a, nb::kw_only(), "epilogue"_a = "store", "onto"_a = nb::none(),
             "precision"_a = nb::none(), "isa"_a = nb::none())
        .def("dequantize", &dequantize)
        .def("row", &row, "index"_a)
        .def_prop_ro("format", [](const Matrix& self) { return std::string(info(self.format()).name); })
        .def_prop_ro("rows", &Matrix::rows)
        .def_prop_ro("cols", &Matrix::cols)
        .def_prop_ro("nbytes", &Matrix::num_bytes);
}

}  // namespace branchline::kernels
