// What each file of this folder adds to the Python module `branchline.engine._kernels`.
#pragma once

#include <nanobind/nanobind.h>

namespace branchline::kernels {

void bind_linear(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_model(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace branchline::kernels
