// Sixteen floats, as one AVX-512 register, two of AVX2, or four of SSE2 or NEON.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define BRANCHLINE_INLINE inline __attribute__((always_inline))

namespace branchline::kernels {
namespace BRANCHLINE_ISA_NAMESPACE {
namespace {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

// Rows of a tile, and vectors beside each other in its accumulators for R rows.
constexpr int kTileRows = 12;
constexpr int vectors_for(int rows) { return rows <= 6 ? 4 : 2; }

using Vec = __m512;

BRANCHLINE_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
/// The same, in a register: as an operand of each multiplication it would be loaded as often.
BRANCHLINE_INLINE Vec spread(float x) {
    Vec v = _mm512_set1_ps(x);
    asm("" : "+v"(v));
    return v;
}
BRANCHLINE_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
BRANCHLINE_INLINE Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }
/// 16 whole numbers.
BRANCHLINE_INLINE Vec load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
BRANCHLINE_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
BRANCHLINE_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
BRANCHLINE_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
BRANCHLINE_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
BRANCHLINE_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
BRANCHLINE_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
/// a in the first n lanes, b in the others.
BRANCHLINE_INLINE Vec first_lanes(int n, Vec a, Vec b) {
    return _mm512_mask_mov_ps(b, static_cast<__mmask16>(n >= kLanes ? 0xffff : n <= 0 ? 0 : (1u << n) - 1), a);
}
/// The even (first) and odd bfloat16 of each 32-bit lane.
BRANCHLINE_INLINE Vec even(Vec w) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(w), 16)); }
BRANCHLINE_INLINE Vec odd(Vec w) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
BRANCHLINE_INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/// a * 2^n of whole n >= -200.
BRANCHLINE_INLINE Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
constexpr float kLeastPower = -200.0f;
BRANCHLINE_INLINE float max_of(Vec a) { return _mm512_reduce_max_ps(a); }
BRANCHLINE_INLINE float sum_of(Vec a) { return _mm512_reduce_add_ps(a); }

#elif defined(__AVX2__)

constexpr int kTileRows = 6;
constexpr int vectors_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

struct Vec {
    __m256 a, b;
};

BRANCHLINE_INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BRANCHLINE_INLINE Vec spread(float x) {
    const __m256 v = _mm256_broadcast_ss(&x);
    return {v, v};
}
BRANCHLINE_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BRANCHLINE_INLINE __m256 less_than(int n, int first) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
}
BRANCHLINE_INLINE Vec load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, _mm256_castps_si256(less_than(n, 0))),
            _mm256_maskload_ps(p + 8, _mm256_castps_si256(less_than(n, 8)))};
}
BRANCHLINE_INLINE __m256 eight_of(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
BRANCHLINE_INLINE Vec load_int8(const int8_t* p) { return {eight_of(p), eight_of(p + 8)}; }
BRANCHLINE_INLINE void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
BRANCHLINE_INLINE Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
BRANCHLINE_INLINE Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
BRANCHLINE_INLINE Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
BRANCHLINE_INLINE Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
BRANCHLINE_INLINE Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
BRANCHLINE_INLINE Vec first_lanes(int n, Vec x, Vec y) {
    return {_mm256_blendv_ps(y.a, x.a, less_than(n, 0)), _mm256_blendv_ps(y.b, x.b, less_than(n, 8))};
}
BRANCHLINE_INLINE __m256 even_half(__m256 w) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(w), 16)); }
BRANCHLINE_INLINE Vec even(Vec w) { return {even_half(w.a), even_half(w.b)}; }
BRANCHLINE_INLINE Vec odd(Vec w) {
    const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm256_and_ps(w.a, high), _mm256_and_ps(w.b, high)};
}
BRANCHLINE_INLINE Vec round(Vec x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
BRANCHLINE_INLINE __m256 scale_half(__m256 a, __m256 n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
BRANCHLINE_INLINE Vec scale_by_power(Vec x, Vec n) { return {scale_half(x.a, n.a), scale_half(x.b, n.b)}; }
constexpr float kLeastPower = -125.0f;
BRANCHLINE_INLINE float max_of(Vec x) {
    const __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
BRANCHLINE_INLINE float sum_of(Vec x) {
    const __m256 m = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}

#else

#if defined(__aarch64__)
constexpr int kTileRows = 6;  // 24 accumulators of 32 registers
#else
constexpr int kTileRows = 2;
#endif
constexpr int vectors_for(int rows) { return rows <= 1 ? 2 : 1; }

using Quad = float __attribute__((vector_size(16)));
using QuadInt = int32_t __attribute__((vector_size(16)));
struct Vec {
    Quad v[4];
};

template <typename Fn>
BRANCHLINE_INLINE Vec each(Fn fn) {
    return {{fn(0), fn(1), fn(2), fn(3)}};
}
BRANCHLINE_INLINE Vec set1(float x) {
    return each([&](int) { return Quad{x, x, x, x}; });
}
BRANCHLINE_INLINE Vec spread(float x) { return set1(x); }
BRANCHLINE_INLINE Vec load(const float* p) {
    Vec x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
BRANCHLINE_INLINE Vec load_first(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) __builtin_memcpy(&lanes[i], p + i, sizeof(float));
    return load(lanes);
}
BRANCHLINE_INLINE Vec load_int8(const int8_t* p) {
    using Four = int8_t __attribute__((vector_size(4)));
    return each([&](int i) {
        Four codes;
        __builtin_memcpy(&codes, p + 4 * i, sizeof codes);
        return __builtin_convertvector(codes, Quad);
    });
}
BRANCHLINE_INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
BRANCHLINE_INLINE Vec add(const Vec& x, const Vec& y) {
    return each([&](int i) { return x.v[i] + y.v[i]; });
}
BRANCHLINE_INLINE Vec sub(const Vec& x, const Vec& y) {
    return each([&](int i) { return x.v[i] - y.v[i]; });
}
BRANCHLINE_INLINE Vec mul(const Vec& x, const Vec& y) {
    return each([&](int i) { return x.v[i] * y.v[i]; });
}
BRANCHLINE_INLINE Vec fma(const Vec& x, const Vec& y, const Vec& z) {
#if defined(__aarch64__)
    return each([&](int i) { return static_cast<Quad>(vfmaq_f32(z.v[i], x.v[i], y.v[i])); });
#else
    return each([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
#endif
}
BRANCHLINE_INLINE Vec max(const Vec& x, const Vec& y) {
    return each([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
}
BRANCHLINE_INLINE Vec first_lanes(int n, const Vec& x, const Vec& y) {
    const QuadInt limit = {n, n, n, n};
    return each([&](int i) {
        const QuadInt lane = QuadInt{0, 1, 2, 3} + 4 * i;
        return lane < limit ? x.v[i] : y.v[i];
    });
}
BRANCHLINE_INLINE QuadInt bits(Quad x) { return reinterpret_cast<QuadInt>(x); }
BRANCHLINE_INLINE Vec even(const Vec& w) {
    return each([&](int i) { return reinterpret_cast<Quad>(bits(w.v[i]) << 16); });
}
BRANCHLINE_INLINE Vec odd(const Vec& w) {
    return each([&](int i) { return reinterpret_cast<Quad>(bits(w.v[i]) & static_cast<int32_t>(0xffff0000u)); });
}
/// Nearest whole number, of |x| < 2^22: adding 1.5 * 2^23 leaves no bits for the fraction.
BRANCHLINE_INLINE Vec round(const Vec& x) {
    return each([&](int i) {
        return (x.v[i] + 12582912.0f) - 12582912.0f;
    });
}
BRANCHLINE_INLINE Vec scale_by_power(const Vec& x, const Vec& n) {
    return each([&](int i) {
        const QuadInt power = __builtin_convertvector(n.v[i], QuadInt);
        return reinterpret_cast<Quad>(bits(x.v[i]) + (power << 23));
    });
}
constexpr float kLeastPower = -125.0f;
BRANCHLINE_INLINE float max_of(const Vec& x) {
    float lanes[kLanes];
    store(lanes, x);
    float most = lanes[0];
    for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
}
BRANCHLINE_INLINE float sum_of(const Vec& x) {
    const Quad s = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

#endif

/// 2^n of whole n <= 0, exactly; below kLeastPower as if n were that.
BRANCHLINE_INLINE Vec power_of_two(Vec n) { return scale_by_power(set1(1.0f), max(n, set1(kLeastPower))); }

/// 2^(x - shift) of a whole `shift` >= x - 1; powers below kLeastPower as if they were that. Relative error at most 3e-7.
///
/// The fraction of x alone is rounded: results for two shifts differ by exactly a power of two.
BRANCHLINE_INLINE Vec exp2(Vec x, Vec shift) {
    const Vec whole = round(x);
    const Vec f = sub(x, whole);  // in [-1/2, 1/2]: a minimax polynomial of degree 5 with p(0) = 1
    Vec p = fma(set1(0.00132764721678f), f, set1(0.00967554133102f));
    p = fma(p, f, set1(0.0555071327288f));
    p = fma(p, f, set1(0.24022119724f));
    p = fma(p, f, set1(0.693146967065f));
    p = fma(p, f, set1(1.0f));
    return scale_by_power(p, max(sub(whole, shift), set1(kLeastPower)));
}

}  // namespace
}  // namespace BRANCHLINE_ISA_NAMESPACE
}  // namespace branchline::kernels
