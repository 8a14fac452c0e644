#include "branchline/kernels/ops.hpp"

namespace branchline::kernels {

namespace baseline {
extern const Ops kOps;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Ops kOps;
}
namespace avx512 {
extern const Ops kOps;
}
#elif defined(__aarch64__)
namespace dotprod {
extern const Ops kOps;
}
#endif

const Ops& ops(Isa isa) {
#if defined(__x86_64__)
    return select_isa(isa, baseline::kOps, avx2::kOps, avx512::kOps);
#elif defined(__aarch64__)
    return select_isa(isa, baseline::kOps, dotprod::kOps);
#else
    return select_isa(isa, baseline::kOps);
#endif
}

}  // namespace branchline::kernels
