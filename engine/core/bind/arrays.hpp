// New numpy arrays, made through numpy's own C interface: a tenth of what one costs through the buffer or DLPack protocols.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace branchline {

/// A new array of `count` handles, not yet filled, and where they go. Throws nb::python_error.
struct NewHandles {
    nanobind::object array;
    uint64_t* data;
};
NewHandles new_handles(int64_t count);

/// A new array that holds a copy of `values`. Throws nb::python_error.
nanobind::object copy_of(const std::vector<int32_t>& values);

/// An array over memory that `owner` keeps, [size] or [rows, columns]. Throws nb::python_error.
nanobind::object view_of(nanobind::handle owner, int32_t* data, int64_t size);
nanobind::object view_of(nanobind::handle owner, int32_t* data, int64_t rows, int64_t columns);

}  // namespace branchline
