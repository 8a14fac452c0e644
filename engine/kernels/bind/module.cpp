// The Python module `branchline.engine._kernels`. Its interface is engine/branchline/engine/_kernels.pyi; keep them in step.

#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_kernels, m) {
    branchline::kernels::bind_linear(m);
    branchline::kernels::bind_attention(m);
    branchline::kernels::bind_model(m);
    branchline::kernels::bind_sampling(m);
}
