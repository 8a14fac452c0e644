#include "bindings.hpp"

namespace branchline::kernels {

void bind_attention(nanobind::module_&) {}

}  // namespace branchline::kernels
