// What one instruction set provides for sampling. No standard library in here.
#pragma once

#include <cstdint>

namespace branchline::kernels {

constexpr int kSampleBlock = 64;  // tokens that have a sum and a largest weight of their own

struct SamplingKernels {
    /// The largest of x [size] and the first place where it is. False if x holds NaN or +inf, or nothing above -inf.
    bool (*peak)(const float* x, int64_t size, float* value, int64_t* place);
    /// weights [size, rounded up to whole blocks] = e^((x - peak) * inverse_temperature), 0 below e^-87 and after `size`.
    /// Of each block the largest weight and the sum.
    void (*weigh)(const float* x, int64_t size, float peak, float inverse_temperature, float* weights, float* block_max,
                  float* block_sum);
};

namespace baseline { extern const SamplingKernels kSampling; }
#if defined(__x86_64__)
namespace avx2 { extern const SamplingKernels kSampling; }
namespace avx512 { extern const SamplingKernels kSampling; }
#elif defined(__aarch64__)
namespace dotprod { extern const SamplingKernels kSampling; }
#endif

}  // namespace branchline::kernels
