// Compiled once per instruction set; see branchline_add_isa_sources.

#include "branchline/kernels/ops.hpp"

#include "exponential.hpp"
#include "simd.hpp"

namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE {
namespace {

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
    F32 sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) {
            const F32 v = load(x + i + k * kLanes);
            sums[k] = fma(v, v, sums[k]);
        }
    }
    const F32 lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0;
    for (int k = 0; k < kLanes; ++k) sum += lanes[k];
    for (; i < size; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
    const F32 scales = broadcast(scale);
    i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scales * load(weight + i));
    for (; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

void add(const float* y, int64_t size, float* x) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, load(x + i) + load(y + i));
    for (; i < size; ++i) x[i] += y[i];
}

void rope(const float* factors, int64_t num_heads, int64_t head_dim, float* x) {
    const int64_t half = head_dim / 2;
    const float* const cosines = factors;
    const float* const sines = factors + half;
    for (float* head = x; head != x + num_heads * head_dim; head += head_dim) {
        int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) {
            const F32 a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
            store(head + i, a * c - b * s);
            store(head + half + i, b * c + a * s);
        }
        for (; i < half; ++i) {
            const float a = head[i], b = head[half + i];
            head[i] = a * cosines[i] - b * sines[i];
            head[half + i] = b * cosines[i] + a * sines[i];
        }
    }
}

typedef float Float1 __attribute__((vector_size(4), may_alias));
typedef uint32_t Word1 __attribute__((vector_size(4), may_alias));

void silu_gate(const float* gate, const float* up, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const F32 g = load(gate + i);
        store(out + i, g / (exponential<F32, U32>(-g) + 1.0f) * load(up + i));
    }
    for (; i < size; ++i) {
        const Float1 g = {gate[i]};
        const Float1 activated = g / (exponential<Float1, Word1>(-g) + 1.0f);
        out[i] = activated[0] * up[i];
    }
}

}  // namespace

extern const Ops kOps;
const Ops kOps = {rms_norm, add, rope, silu_gate};

}  // namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE
