#include "bindings.hpp"

namespace branchline::kernels {

void bind_model(nanobind::module_&) {}

}  // namespace branchline::kernels
