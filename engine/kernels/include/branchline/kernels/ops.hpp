// Elementwise work of a decoder on one row of float32 at a time.
#pragma once

#include <cstdint>

#include "branchline/kernels/isa.hpp"

namespace branchline::kernels {

/// The kernels of one instruction set. A row's result depends on that row alone. Any size >= 1; no alignment is asked for.
struct Ops {
    /// out = x / sqrt(mean(x²) + eps) · weight; all [size]. `out` may be `x`.
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
    /// x += y; both [size].
    void (*add)(const float* y, int64_t size, float* x);
    /// Rotates `num_heads` heads of x [num_heads, head_dim] in place by the angles of one position: `factors` holds their
    /// head_dim / 2 cosines, then their sines (rotate-half convention).
    void (*rope)(const float* factors, int64_t num_heads, int64_t head_dim, float* x);
    /// out = silu(gate) · up; all [size]. `out` may be either.
    void (*silu_gate)(const float* gate, const float* up, int64_t size, float* out);
};

const Ops& ops(Isa isa);

}  // namespace branchline::kernels
