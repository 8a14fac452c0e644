// The passes over whole rows of logits; compiled once per instruction set.

#include "exponential.hpp"
#include "sampling_kernels.hpp"
#include "simd.hpp"

namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kScan = 1024;  // numbers between two looks whether the largest has changed

BRANCHLINE_INLINE float largest(F32 v) {
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
}

bool peak(const float* x, int64_t size, float* value, int64_t* place) {
    float most = -kInfinity;
    int64_t where = -1;
    U32 wrong = {};
    bool is_wrong = false;
    for (int64_t begin = 0; begin < size; begin += kScan) {
        const int64_t end = begin + kScan < size ? begin + kScan : size;
        F32 top[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
        int64_t i = begin;
        for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
            const F32 a = load(x + i), b = load(x + i + kLanes);
            wrong |= (U32)(a != a) | (U32)(b != b);
            top[0] = max(a, top[0]);
            top[1] = max(b, top[1]);
        }
        float here = largest(max(top[0], top[1]));
        for (; i < end; ++i) {
            is_wrong |= x[i] != x[i];
            here = x[i] > here ? x[i] : here;
        }
        if (here > most) {
            most = here;
            where = begin;
        }
    }
    for (int i = 0; i < kLanes; ++i) is_wrong |= wrong[i] != 0;
    if (is_wrong || where < 0 || most == kInfinity) return false;
    while (x[where] != most) ++where;
    *value = most;
    *place = where;
    return true;
}

void weigh(const float* x, int64_t size, float peak, float inverse_temperature, float* weights, float* block_max,
           float* block_sum) {
    const F32 highest = broadcast(peak), factor = broadcast(inverse_temperature), least = broadcast(-87.0f);
    for (int64_t begin = 0, block = 0; begin < size; begin += kSampleBlock, ++block) {
        float rest[kSampleBlock];
        const float* from = x + begin;
        if (size - begin < kSampleBlock) {
            for (int i = 0; i < kSampleBlock; ++i) rest[i] = begin + i < size ? from[i] : -kInfinity;
            from = rest;
        }
        F32 top = {}, sum = {};
        for (int i = 0; i < kSampleBlock; i += kLanes) {
            const F32 scaled = (load(from + i) - highest) * factor;
            const F32 weight = scaled >= least ? exponential<F32, U32>(scaled) : F32{};
            store(weights + begin + i, weight);
            top = max(top, weight);
            sum += weight;
        }
        block_max[block] = largest(top);
        float total = 0;
        for (int i = 0; i < kLanes; ++i) total += sum[i];
        block_sum[block] = total;
    }
}

}  // namespace

extern const SamplingKernels kSampling;
const SamplingKernels kSampling = {peak, weigh};

}  // namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE
