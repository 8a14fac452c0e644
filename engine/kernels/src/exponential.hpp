// e^x, for sources that CMake's branchline_add_isa_sources compiles.
#pragma once

#include "simd.hpp"

namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE {

/// e^x by 2^n · p(r), Cephes' polynomial (Moshier, expf): 2 units in the last place within [-87, 88], to which x is clamped.
template <typename V, typename I>
BRANCHLINE_INLINE V exponential(V x) {
    const V zero = {};
    const V high = zero + 88.0f, low = zero - 87.0f;
    x = x > high ? high : x;
    x = x < low ? low : x;
    const V shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 · 2^23: the sum's low bits are the nearest integer
    const I bits = (I)shifted;
    const V n = shifted - 12582912.0f;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (V)((I)p + (bits << 23));
}

}  // namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE
