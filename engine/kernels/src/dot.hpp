// Exact dot products of 8-bit numbers, four columns of kLanes rows at a time.
//
// A Dot type is what one instruction set does for codes of one width. `Codes` are 4 columns x kLanes rows. A sum over 32
// columns is exact in each: at most 32 * 255 * 127 < 2^20, which a float holds too.
#pragma once

#include "simd.hpp"

namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE {

/// 4 columns x kLanes rows of codes, as they lie in memory.
BRANCHLINE_INLINE U32 load_codes(const uint8_t* p) {
    U32 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

/// Four activation codes, as one number.
BRANCHLINE_INLINE int32_t load_four(const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

#if defined(__AVX512VNNI__)

/// Unsigned codes times signed ones, four products added to a 32-bit sum at once.
template <bool kWide>
struct Dot {
    using Codes = U32;
    using Sum = I32;
    /// True: sums of 8-bit codes contain the offset of 128, and start from the bias that takes it off.
    static constexpr bool kBiased = kWide;

    static BRANCHLINE_INLINE Codes prepare(U32 codes) { return codes; }
    static BRANCHLINE_INLINE Sum zero() { return Sum{}; }
    static BRANCHLINE_INLINE Sum add(Sum a, Sum b) { return a + b; }
    static BRANCHLINE_INLINE Sum start(int32_t bias) { return (Sum)_mm512_set1_epi32(bias); }
    static BRANCHLINE_INLINE void step(Sum& sum, Codes codes, int32_t four) {
        sum = (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
    }
    static BRANCHLINE_INLINE F32 finish(Sum sum) { return to_float(sum); }
};

#elif defined(__AVX2__)

template <bool kWide>
struct Dot;

/// The compiler would turn a chain of whole-number additions into a tree, whose leaves don't fit the registers.
BRANCHLINE_INLINE void keep_in_order(__m256i& sum) { asm("" : "+x"(sum)); }

/// vpmaddubsw adds pairs of products in 16 bits, saturating. 4-bit codes: a pair is at most 2 * 15 * 127 = 3,810 in size, and
/// the eight pairs of 32 columns 30,480 < 2^15, so that nothing saturates or wraps before the one widening at the end.
template <>
struct Dot<false> {
    using Codes = __m256i;
    using Sum = __m256i;
    static constexpr bool kBiased = false;

    static BRANCHLINE_INLINE Codes prepare(U32 codes) { return (__m256i)codes; }
    static BRANCHLINE_INLINE Sum zero() { return _mm256_setzero_si256(); }
    static BRANCHLINE_INLINE Sum add(Sum a, Sum b) { return _mm256_add_epi16(a, b); }
    static BRANCHLINE_INLINE void step(Sum& sum, Codes codes, int32_t four) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(four)));
        keep_in_order(sum);
    }
    static BRANCHLINE_INLINE F32 finish(Sum sum) {
        return to_float((I32)_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    }
};

/// 8-bit codes: |code| times the activation with the code's sign. A pair is at most 2 * 128 * 127 = 32,512 < 2^15 in size; the
/// activations are never -128, which has no negative. Two pairs may pass 2^15, so each is widened before it is added.
template <>
struct Dot<true> {
    struct Codes {
        __m256i magnitudes;
        __m256i signs;
    };
    using Sum = __m256i;
    static constexpr bool kBiased = false;

    static BRANCHLINE_INLINE Codes prepare(U32 codes) {
        const __m256i signs = _mm256_xor_si256((__m256i)codes, _mm256_set1_epi8(-128));
        return {_mm256_abs_epi8(signs), signs};
    }
    static BRANCHLINE_INLINE Sum zero() { return _mm256_setzero_si256(); }
    static BRANCHLINE_INLINE Sum add(Sum a, Sum b) { return _mm256_add_epi32(a, b); }
    static BRANCHLINE_INLINE void step(Sum& sum, const Codes& codes, int32_t four) {
        const __m256i pairs = _mm256_maddubs_epi16(codes.magnitudes, _mm256_sign_epi8(_mm256_set1_epi32(four), codes.signs));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        keep_in_order(sum);
    }
    static BRANCHLINE_INLINE F32 finish(Sum sum) { return to_float((I32)sum); }
};

#elif defined(__ARM_FEATURE_DOTPROD)

/// Signed codes times signed ones.
template <bool kWide>
struct Dot {
    using Codes = int8x16_t;
    using Sum = int32x4_t;
    static constexpr bool kBiased = false;

    static BRANCHLINE_INLINE Codes prepare(U32 codes) {
        const auto bytes = (uint8x16_t)codes;
        return vreinterpretq_s8_u8(kWide ? veorq_u8(bytes, vdupq_n_u8(128)) : bytes);
    }
    static BRANCHLINE_INLINE Sum zero() { return vdupq_n_s32(0); }
    static BRANCHLINE_INLINE Sum add(Sum a, Sum b) { return vaddq_s32(a, b); }
    static BRANCHLINE_INLINE void step(Sum& sum, Codes codes, int32_t four) {
        sum = vdotq_s32(sum, codes, vreinterpretq_s8_s32(vdupq_n_s32(four)));
    }
    static BRANCHLINE_INLINE F32 finish(Sum sum) { return to_float((I32)sum); }
};

#else

/// Sums of whole numbers in floats.
template <bool kWide>
struct Dot {
    using Codes = U32;
    using Sum = F32;
    static constexpr bool kBiased = false;

    static BRANCHLINE_INLINE Codes prepare(U32 codes) { return kWide ? codes ^ 0x80808080u : codes; }
    static BRANCHLINE_INLINE Sum zero() { return Sum{}; }
    static BRANCHLINE_INLINE Sum add(Sum a, Sum b) { return a + b; }
    static BRANCHLINE_INLINE void step(Sum& sum, Codes codes, int32_t four) {
        for (int c = 0; c < 4; ++c) {
            const auto x = static_cast<int8_t>(static_cast<uint32_t>(four) >> (8 * c));
            sum += to_float((I32)(codes << (24 - 8 * c)) >> 24) * broadcast(x);
        }
    }
    static BRANCHLINE_INLINE F32 finish(Sum sum) { return sum; }
};

#endif

}  // namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE
