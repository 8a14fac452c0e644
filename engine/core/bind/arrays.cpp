#include "arrays.hpp"

#include <algorithm>
#include <utility>

namespace nb = nanobind;

namespace branchline {

namespace {

/// The part of numpy's C interface that is needed here. Its table is the same for all of numpy 1 and 2, so that neither its
/// headers nor a certain version is needed to compile. The places are those of numpy's code_generators/numpy_api.py; pybind11
/// reads the table in the same way.
struct NumpyApi {
    /// PyArray_New: type, dimensions, shape, dtype's number, strides, data, item size, flags, template.
    using Make = PyObject* (*)(PyObject*, int, const Py_ssize_t*, int, const Py_ssize_t*, void*, int, int, PyObject*);
    /// PyArray_SetBaseObject: takes `base`.
    using SetBase = int (*)(PyObject* array, PyObject* base);

    PyObject* array_type;  // 2
    Make make;             // 93
    SetBase set_base;      // 282
};

/// What every array object begins with.
struct ArrayHead {
    PyObject_HEAD
    char* data;
};

constexpr int kInt32 = 5;                                     // NPY_INT
constexpr int kUint64 = sizeof(unsigned long) == 8 ? 8 : 10;  // NPY_ULONG or NPY_ULONGLONG
constexpr int kWritableRows = 0x0001 | 0x0100 | 0x0400;       // C-contiguous, aligned, writable

NumpyApi load_numpy() {
    nb::object module = nb::steal(PyImport_ImportModule("numpy._core.multiarray"));
    if (!module.is_valid()) {
        PyErr_Clear();
        module = nb::module_::import_("numpy.core.multiarray");  // before numpy 2
    }
    void** const table = static_cast<void**>(PyCapsule_GetPointer(nb::object(module.attr("_ARRAY_API")).ptr(), nullptr));
    if (table == nullptr) nb::raise_python_error();
    return NumpyApi{static_cast<PyObject*>(table[2]), reinterpret_cast<NumpyApi::Make>(table[93]),
                    reinterpret_cast<NumpyApi::SetBase>(table[282])};
}

const NumpyApi& numpy() {
    static const NumpyApi api = load_numpy();
    return api;
}

nb::object make_array(int type, int num_dims, const Py_ssize_t* shape, void* data) {
    const NumpyApi& api = numpy();
    const int flags = data != nullptr ? kWritableRows : 0;
    PyObject* const array = api.make(api.array_type, num_dims, shape, type, nullptr, data, 0, flags, nullptr);
    if (array == nullptr) nb::raise_python_error();
    return nb::steal(array);
}

void* data_of(const nb::object& array) { return reinterpret_cast<ArrayHead*>(array.ptr())->data; }

nb::object make_view(nb::handle owner, int32_t* data, int num_dims, const Py_ssize_t* shape) {
    nb::object array = make_array(kInt32, num_dims, shape, data);
    if (numpy().set_base(array.ptr(), owner.inc_ref().ptr()) < 0) nb::raise_python_error();
    return array;
}

}  // namespace

NewHandles new_handles(int64_t count) {
    const Py_ssize_t shape[] = {static_cast<Py_ssize_t>(count)};
    nb::object array = make_array(kUint64, 1, shape, nullptr);
    uint64_t* const data = static_cast<uint64_t*>(data_of(array));
    return NewHandles{std::move(array), data};
}

nb::object copy_of(const std::vector<int32_t>& values) {
    const Py_ssize_t shape[] = {static_cast<Py_ssize_t>(values.size())};
    nb::object array = make_array(kInt32, 1, shape, nullptr);
    std::copy(values.begin(), values.end(), static_cast<int32_t*>(data_of(array)));
    return array;
}

nb::object view_of(nb::handle owner, int32_t* data, int64_t size) {
    const Py_ssize_t shape[] = {static_cast<Py_ssize_t>(size)};
    return make_view(owner, data, 1, shape);
}

nb::object view_of(nb::handle owner, int32_t* data, int64_t rows, int64_t columns) {
    const Py_ssize_t shape[] = {static_cast<Py_ssize_t>(rows), static_cast<Py_ssize_t>(columns)};
    return make_view(owner, data, 2, shape);
}

}  // namespace branchline
