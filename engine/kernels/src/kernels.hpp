// The linear layers' kernels of each instruction set.
#pragma once

#include "branchline/kernels/isa.hpp"
#include "layout.hpp"

namespace branchline::kernels {

inline const LinearKernels& linear_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
    return select_isa(isa, baseline::kLinear, avx2::kLinear, avx512::kLinear);
#elif defined(__aarch64__)
    return select_isa(isa, baseline::kLinear, dotprod::kLinear);
#else
    return select_isa(isa, baseline::kLinear);
#endif
}

}  // namespace branchline::kernels
