// Vectors of the instruction set that a source is compiled for. For sources that CMake's branchline_add_isa_sources compiles.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef BRANCHLINE_ISA_NAMESPACE
#error "compile this source through branchline_add_isa_sources"
#endif

#define BRANCHLINE_INLINE inline __attribute__((always_inline))

namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE {

// F32 and I32: kLanes elements; `+ - * / < & | >>` work on them element by element (compiler vectors).
#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
typedef float F32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes), may_alias));

BRANCHLINE_INLINE F32 load(const float* p) {
    F32 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

BRANCHLINE_INLINE void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }

BRANCHLINE_INLINE F32 broadcast(float x) { return x - F32{}; }

/// a * b + c; rounded once where the instruction set can.
BRANCHLINE_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

BRANCHLINE_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }

BRANCHLINE_INLINE F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }

/// kLanes bfloat16 numbers.
BRANCHLINE_INLINE F32 load_bf16(const uint16_t* p) {
    typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
    Half h;
    std::memcpy(&h, p, sizeof h);
    return (F32)(__builtin_convertvector(h, U32) << 16);
}

/// kLanes IEEE half precision numbers.
BRANCHLINE_INLINE F32 load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON)
    return (F32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
    Half h;
    std::memcpy(&h, p, sizeof h);
    const U32 bits = __builtin_convertvector(h, U32);
    // Exponent and fraction shifted into place and scaled by 2^(127 - 15); what was infinite or NaN gets its exponent back.
    const U32 magnitude = (bits & 0x7fffu) << 13;
    F32 v = (F32)magnitude * 0x1p112f;
    v = (magnitude >= 0x0f800000u) ? (F32)((U32)v | 0x7f800000u) : v;
    return (F32)((U32)v | ((bits & 0x8000u) << 16));
#endif
}

}  // namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE
