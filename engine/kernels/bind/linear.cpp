#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings.hpp"
#include "branchline/kernels/isa.hpp"
#include "branchline/kernels/thread_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline::kernels {

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
}

}  // namespace branchline::kernels
