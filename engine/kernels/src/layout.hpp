// How a packed matrix and packed activations lie in memory. The same for every instruction set.
//
// Rows of a matrix are taken in groups of 16 (kRows), columns in blocks of 32 (kCols), tokens in panels of 16 (kTokens). A
// group of a quantised matrix is: the codes of all its blocks, then the scales, then the minimums. The codes of a block are
// vectors of 16 rows x 4 columns, one byte a code, four columns of a row side by side (what an 8-bit dot product takes); the
// 4-bit layout has two vectors in one, the first four columns in the low nibbles and the next four in the high ones. A group
// of a dense matrix is [cols][16].
#pragma once

#include <cstddef>
#include <cstdint>

#include "branchline/kernels/formats.hpp"

namespace branchline::kernels {

inline constexpr int kRows = 16;
inline constexpr int kCols = 32;
inline constexpr int kTokens = 16;

/// value = scale * (code - offset) + minimum.
enum class Layout {
    u4,          // scale a half a block; offset 8
    u4_min,      // scale and minimum halves; no offset
    u4_min_f32,  // the same in floats, for scales that are products
    u8,          // scale a half; offset 128, here and below
    u8_min,
    u8_min_f32,
    u8_split_f32,  // a float scale for each 16 columns
    f32,
    f16,
    bf16,
};
inline constexpr int kNumLayouts = 10;
inline constexpr int kNumQuantisedLayouts = 7;

constexpr bool is_dense(Layout layout) { return static_cast<int>(layout) >= kNumQuantisedLayouts; }
constexpr bool is_u4(Layout l) { return l == Layout::u4 || l == Layout::u4_min || l == Layout::u4_min_f32; }
constexpr bool has_minimum(Layout l) {
    return l == Layout::u4_min || l == Layout::u4_min_f32 || l == Layout::u8_min || l == Layout::u8_min_f32;
}
constexpr bool has_float_scales(Layout l) {
    return l == Layout::u4_min_f32 || l == Layout::u8_min_f32 || l == Layout::u8_split_f32;
}
constexpr int scales_per_block(Layout l) { return l == Layout::u8_split_f32 ? 2 : 1; }
constexpr int code_offset(Layout l) { return l == Layout::u4 ? 8 : is_u4(l) ? 0 : 128; }
constexpr int code_bytes(Layout l) { return is_u4(l) ? kRows * kCols / 2 : kRows * kCols; }  // of one block
constexpr int scale_bytes(Layout l) { return has_float_scales(l) ? 4 : 2; }                  // of one scale
constexpr int dense_bytes(Layout l) { return l == Layout::f32 ? 4 : 2; }                     // of one number

constexpr Layout layout_of(Format format) {
    switch (format) {
        case Format::q4_0: return Layout::u4;
        case Format::q4_1: return Layout::u4_min;
        case Format::q4_k: return Layout::u4_min_f32;
        case Format::q8_0:
        case Format::q5_0: return Layout::u8;
        case Format::q5_1: return Layout::u8_min;
        case Format::q5_k: return Layout::u8_min_f32;
        case Format::q6_k: return Layout::u8_split_f32;
        case Format::f32: return Layout::f32;
        case Format::f16: return Layout::f16;
        case Format::bf16: return Layout::bf16;
    }
    return Layout::f32;
}

/// Where the parts of a group begin, in bytes from its start.
struct GroupShape {
    int64_t scales;    // [blocks][scales per block][16]
    int64_t minimums;  // [blocks][16]
    int64_t bytes;     // of the whole group, a multiple of 64

    constexpr GroupShape(Layout l, int64_t cols) : scales(0), minimums(0), bytes(0) {
        if (is_dense(l)) {
            bytes = cols * kRows * dense_bytes(l);
        } else {
            const int64_t blocks = cols / kCols;
            scales = blocks * code_bytes(l);
            minimums = scales + blocks * scales_per_block(l) * kRows * scale_bytes(l);
            bytes = minimums + (has_minimum(l) ? blocks * kRows * scale_bytes(l) : 0);
        }
        bytes = (bytes + 63) / 64 * 64;
    }
};

/// One block of columns of a panel of quantised activations: value = scale * code.
struct alignas(64) PanelBlock {
    int8_t codes[kTokens][kCols];
    float scales[kTokens];
    float sums[kTokens];          // scale * (sum of the codes)
    int32_t biases[kTokens];      // -128 * (sum of the codes)
    int32_t half_biases[2][kTokens];  // the same for the first and the last 16 columns
};

/// What a kernel needs to multiply one group of rows by one panel of tokens.
struct GroupTask {
    const uint8_t* group;
    GroupShape shape;
    int64_t cols;
    const void* panel;  // PanelBlock[cols / 32], or float[cols][16]
    int tokens;         // 1 to 16: the panel's first
    float* out;         // float[16 tokens][16 rows], aligned to 64; places after `tokens` may be written too
};
using GroupKernel = void (*)(const GroupTask&);

/// What one instruction set provides.
struct LinearKernels {
    GroupKernel quantised[kNumQuantisedLayouts];  // 8-bit activations
    GroupKernel exact[kNumLayouts];               // float activations
    /// y[t * stride + r] = out[t][r], or += ; `rows` of 16, `tokens` of 16.
    void (*store)(const float* out, int tokens, int rows, float* y, int64_t stride);
    void (*add)(const float* out, int tokens, int rows, float* y, int64_t stride);
    /// y[t * stride + r] = silu(gate[t][r]) * up[t][r].
    void (*silu)(const float* gate, const float* up, int tokens, int rows, float* y, int64_t stride);
    /// Quantises the first `tokens` of 16 rows of x to a panel; the others become zero.
    void (*quantise)(const float* x, int64_t stride, int tokens, int64_t cols, PanelBlock* panel);
};

namespace baseline { extern const LinearKernels kLinear; }
#if defined(__x86_64__)
namespace avx2 { extern const LinearKernels kLinear; }
namespace avx512 { extern const LinearKernels kLinear; }
#elif defined(__aarch64__)
namespace dotprod { extern const LinearKernels kLinear; }
#endif

}  // namespace branchline::kernels
