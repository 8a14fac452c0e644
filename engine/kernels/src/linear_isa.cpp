// The linear layers' kernels; compiled once per instruction set.

#include <cstddef>
#include <utility>

#include "dot.hpp"
#include "layout.hpp"

namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE {
namespace {

// Arrays of vectors stay in registers only where the loops over them are unrolled early.
#define BRANCHLINE_UNROLL _Pragma("GCC unroll 16")

constexpr int kParts = kRows / kLanes;  // vectors that 16 rows take

/// Most tokens that are multiplied at once: as many as the registers hold a sum and an accumulator of.
#if defined(__AVX512F__)
constexpr int kMaxTile = 8;
/// A single token is multiplied together with the place after it, which is never the next panel's: while weights stream from
/// memory the second product is free, and a tile of one was measured 10 % slower than one of two (Zen 4).
constexpr int kMinTile = 2;
#else
constexpr int kMaxTile = 4;
constexpr int kMinTile = 1;
#endif

/// Calls run.template operator()<T>(first) for tiles that cover `tokens`.
template <typename Run>
BRANCHLINE_INLINE void for_each_tile(int tokens, Run run) {
    int t = 0;
    if constexpr (kMaxTile >= 8) {
        for (; tokens - t >= 8; t += 8) run.template operator()<8>(t);
    }
    for (; tokens - t >= 4; t += 4) run.template operator()<4>(t);
    for (; tokens - t >= 2; t += 2) run.template operator()<2>(t);
    if (t < tokens) run.template operator()<kMinTile>(t);
}

/// kLanes scales or minimums: number `index` of an array of 16 rows each.
template <Layout L>
BRANCHLINE_INLINE F32 load_scales(const uint8_t* base, int64_t index, int part) {
    const int64_t at = index * kRows + part * kLanes;
    if constexpr (has_float_scales(L)) {
        return load(reinterpret_cast<const float*>(base) + at);
    } else {
        return load_f16(reinterpret_cast<const uint16_t*>(base) + at);
    }
}

/// Asks for block `b` of the group after this one, into the second-level cache: a group's codes and scales are streams too
/// short for the hardware to follow. Measured with few tokens: half the time. (Into the first level it gains nothing.) Behind
/// the last group it asks for memory that may not exist, which does no harm.
template <Layout L>
BRANCHLINE_INLINE void prefetch_next(const GroupTask& task, int64_t b) {
    constexpr int kScaleBytes = scales_per_block(L) * kRows * scale_bytes(L);
    constexpr int kMinimumBytes = kRows * scale_bytes(L);
    const uint8_t* const next = task.group + task.shape.bytes;
    for (int i = 0; i < code_bytes(L); i += 64) __builtin_prefetch(next + b * code_bytes(L) + i, 0, 2);
    if (kScaleBytes >= 64 || b % 2 == 0) {
        for (int i = 0; i < kScaleBytes; i += 64) {
            __builtin_prefetch(next + task.shape.scales + b * kScaleBytes + i, 0, 2);
        }
        if constexpr (has_minimum(L)) __builtin_prefetch(next + task.shape.minimums + b * kMinimumBytes, 0, 2);
    }
}

/// Where a block's numbers begin.
constexpr std::size_t kNumbers = offsetof(PanelBlock, scales);

/// Number `index` of an array that begins `offset` bytes after `base`.
template <typename T>
BRANCHLINE_INLINE T number(const std::byte* base, std::size_t offset, int index) {
    T value;
    std::memcpy(&value, base + offset + static_cast<std::size_t>(index) * sizeof(T), sizeof value);
    return value;
}

/// kLanes rows times T tokens of a panel, through all columns.
template <Layout L, int T>
BRANCHLINE_INLINE void quantised_tile(const GroupTask& task, int first, int part) {
    using D = Dot<!is_u4(L)>;
    constexpr int kHalves = scales_per_block(L);
    constexpr int kVectors = kCols / 4 / kHalves;  // of codes to a scale
    constexpr bool kSplit = T <= 2;                // the sums, which are exact, in two chains that don't wait for each other
    const uint8_t* codes = task.group + part * 4 * kLanes;
    const uint8_t* const scales = task.group + task.shape.scales;
    const uint8_t* const minimums = task.group + task.shape.minimums;
    // Of the first token; the others' numbers lie at constant distances.
    const auto* const panel = static_cast<const PanelBlock*>(task.panel);
    const int8_t* x = panel->codes[first];
    const std::byte* numbers = reinterpret_cast<const std::byte*>(panel->scales + first);
    const auto x_scale = [&](int t) { return number<float>(numbers, 0, t); };
    const auto x_sum = [&](int t) { return number<float>(numbers, offsetof(PanelBlock, sums) - kNumbers, t); };
    const auto x_bias = [&](int t) { return number<int32_t>(numbers, offsetof(PanelBlock, biases) - kNumbers, t); };
    const auto x_half_bias = [&](int h, int t) {
        return number<int32_t>(numbers, offsetof(PanelBlock, half_biases) - kNumbers, h * kTokens + t);
    };
    const int64_t blocks = task.cols / kCols;
    const bool is_first = first == 0 && part == 0;
    F32 acc[T] = {};
    for (int64_t b = 0; b < blocks; ++b) {
        if (is_first) prefetch_next<L>(task, b);
        for (int h = 0; h < kHalves; ++h) {
            typename D::Sum sum[T];
            typename D::Sum odd_sum[kSplit ? T : 1];
            BRANCHLINE_UNROLL
            for (int t = 0; t < T; ++t) {
                if constexpr (kSplit) odd_sum[t] = D::zero();
                if constexpr (D::kBiased) {
                    sum[t] = D::start(kHalves == 2 ? x_half_bias(h, t) : x_bias(t));
                } else {
                    sum[t] = D::zero();
                }
            }
            BRANCHLINE_UNROLL
            for (int v = 0; v < kVectors; v += 2) {
                typename D::Codes even;
                typename D::Codes odd;
                if constexpr (is_u4(L)) {
                    const U32 both = load_codes(codes + v / 2 * 4 * kRows);
                    even = D::prepare(both & 0x0f0f0f0fu);
                    odd = D::prepare((both >> 4) & 0x0f0f0f0fu);
                } else {
                    even = D::prepare(load_codes(codes + (h * kVectors + v) * 4 * kRows));
                    odd = D::prepare(load_codes(codes + (h * kVectors + v + 1) * 4 * kRows));
                }
                const int8_t* const four = x + (h * kVectors + v) * 4;
                BRANCHLINE_UNROLL
                for (int t = 0; t < T; ++t) D::step(sum[t], even, load_four(four + t * kCols));
                BRANCHLINE_UNROLL
                for (int t = 0; t < T; ++t) D::step(kSplit ? odd_sum[t] : sum[t], odd, load_four(four + t * kCols + 4));
            }
            const F32 scale = load_scales<L>(scales, b * kHalves + h, part);
            BRANCHLINE_UNROLL
            for (int t = 0; t < T; ++t) {
                F32 dot = D::finish(kSplit ? D::add(sum[t], odd_sum[t]) : sum[t]);
                if constexpr (L == Layout::u4) dot += broadcast(static_cast<float>(x_bias(t) / 16));
                acc[t] = fma(dot * broadcast(x_scale(t)), scale, acc[t]);
            }
        }
        if constexpr (has_minimum(L)) {
            const F32 minimum = load_scales<L>(minimums, b, part);
            BRANCHLINE_UNROLL
            for (int t = 0; t < T; ++t) acc[t] = fma(minimum, broadcast(x_sum(t)), acc[t]);
        }
        codes += code_bytes(L);
        x += sizeof(PanelBlock);
        numbers += sizeof(PanelBlock);
    }
    BRANCHLINE_UNROLL
    for (int t = 0; t < T; ++t) store(task.out + (first + t) * kRows + part * kLanes, acc[t]);
}

template <Layout L>
void quantised(const GroupTask& task) {
    for_each_tile(task.tokens, [&]<int T>(int first) {
        for (int part = 0; part < kParts; ++part) quantised_tile<L, T>(task, first, part);
    });
}

/// Columns [32 * block, 32 * block + cols) of a group as float[cols][16]: in place for floats, else in `scratch`.
template <Layout L>
BRANCHLINE_INLINE const float* dequantise(const GroupTask& task, int64_t block, int cols, float* scratch) {
    const int64_t first = block * kCols * kRows;
    if constexpr (L == Layout::f32) return reinterpret_cast<const float*>(task.group) + first;
    if constexpr (L == Layout::f16 || L == Layout::bf16) {
        const auto* const source = reinterpret_cast<const uint16_t*>(task.group) + first;
        for (int i = 0; i < cols * kRows; i += kLanes) {
            store(scratch + i, L == Layout::f16 ? load_f16(source + i) : load_bf16(source + i));
        }
    } else if constexpr (!is_dense(L)) {
        constexpr int kHalves = scales_per_block(L);
        const uint8_t* const codes = task.group + block * code_bytes(L);
        for (int part = 0; part < kParts; ++part) {
            F32 minimum = {};
            if constexpr (has_minimum(L)) minimum = load_scales<L>(task.group + task.shape.minimums, block, part);
            for (int v = 0; v < kCols / 4; ++v) {
                const int h = v * kHalves / (kCols / 4);
                const F32 scale = load_scales<L>(task.group + task.shape.scales, block * kHalves + h, part);
                const int vector = is_u4(L) ? v / 2 : v;
                U32 packed = load_codes(codes + (vector * kRows + part * kLanes) * 4);
                if constexpr (is_u4(L)) packed = v % 2 == 0 ? packed & 0x0f0f0f0fu : (packed >> 4) & 0x0f0f0f0fu;
                for (int c = 0; c < 4; ++c) {
                    const I32 code = (I32)((packed >> (8 * c)) & 255u) - code_offset(L);
                    F32 value = to_float(code) * scale;
                    if constexpr (has_minimum(L)) value += minimum;
                    store(scratch + (4 * v + c) * kRows + part * kLanes, value);
                }
            }
        }
    }
    return scratch;
}

template <int T>
BRANCHLINE_INLINE void exact_tile(const float* weights, const float* x, int cols, float* out, int part) {
    F32 acc[T];
    for (int t = 0; t < T; ++t) acc[t] = load(out + t * kRows + part * kLanes);
    for (int c = 0; c < cols; ++c) {
        const F32 w = load(weights + c * kRows + part * kLanes);
        for (int t = 0; t < T; ++t) acc[t] = fma(w, broadcast(x[c * kTokens + t]), acc[t]);
    }
    for (int t = 0; t < T; ++t) store(out + t * kRows + part * kLanes, acc[t]);
}

template <Layout L>
void exact(const GroupTask& task) {
    const auto* const x = static_cast<const float*>(task.panel);
    alignas(64) float scratch[kCols * kRows];
    std::memset(task.out, 0, sizeof(float) * kRows * kTokens);
    for (int64_t c = 0; c < task.cols; c += kCols) {
        const int cols = static_cast<int>(task.cols - c < kCols ? task.cols - c : kCols);
        const float* const weights = dequantise<L>(task, c / kCols, cols, scratch);
        for_each_tile(task.tokens, [&]<int T>(int first) {
            for (int part = 0; part < kParts; ++part) {
                exact_tile<T>(weights, x + c * kTokens + first, cols, task.out + first * kRows, part);
            }
        });
    }
}

/// Runs on 16 rows of each token: `combine(t, offset, y)` gives kLanes results. Writes the first `rows`.
template <typename Combine>
BRANCHLINE_INLINE void write(int tokens, int rows, float* y, int64_t stride, Combine combine) {
    for (int t = 0; t < tokens; ++t) {
        float* const to = y + t * stride;
        if (rows == kRows) {
            for (int i = 0; i < kRows; i += kLanes) store(to + i, combine(t, i, to + i));
            continue;
        }
        float whole[kRows] = {};
        for (int i = 0; i < rows; ++i) whole[i] = to[i];
        for (int i = 0; i < kRows; i += kLanes) store(whole + i, combine(t, i, whole + i));
        for (int i = 0; i < rows; ++i) to[i] = whole[i];
    }
}

void write_store(const float* out, int tokens, int rows, float* y, int64_t stride) {
    write(tokens, rows, y, stride, [&](int t, int i, const float*) { return load(out + t * kRows + i); });
}

void write_add(const float* out, int tokens, int rows, float* y, int64_t stride) {
    write(tokens, rows, y, stride, [&](int t, int i, const float* old) { return load(old) + load(out + t * kRows + i); });
}

/// e^x for x <= 0 or so: 2^n * e^r with |r| <= ln 2 / 2, the latter by its series to r^7. Relative error below 2e-7; results
/// below the normal numbers are zero or the smallest of them, and NaN stays NaN.
BRANCHLINE_INLINE F32 exp_clamped(F32 x) {
    x = x < -87.0f ? broadcast(-87.0f) : x;
    x = x > 88.0f ? broadcast(88.0f) : x;
    const F32 magic = broadcast(0x1.8p23f);  // adding it rounds to a whole number
    const F32 shifted = fma(x, broadcast(0x1.715476p0f), magic);
    const F32 n = shifted - magic;
    F32 r = fma(n, broadcast(-0x1.62e400p-1f), x);
    r = fma(n, broadcast(-0x1.7f7d1cp-20f), r);
    F32 p = broadcast(1.0f / 5040.0f);
    p = fma(p, r, broadcast(1.0f / 720.0f));
    p = fma(p, r, broadcast(1.0f / 120.0f));
    p = fma(p, r, broadcast(1.0f / 24.0f));
    p = fma(p, r, broadcast(1.0f / 6.0f));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    const U32 power = ((U32)shifted << 23) + 0x3f800000u;  // 2^n
    return p * (F32)power;
}

void write_silu(const float* gate, const float* up, int tokens, int rows, float* y, int64_t stride) {
    write(tokens, rows, y, stride, [&](int t, int i, const float*) {
        const F32 g = load(gate + t * kRows + i);
        return g / (exp_clamped(-g) + 1.0f) * load(up + t * kRows + i);
    });
}

template <int kStep, int... kIndex>
BRANCHLINE_INLINE U32 swap_lanes(U32 v, std::integer_sequence<int, kIndex...>) {
    return __builtin_shufflevector(v, v, (kIndex ^ kStep)...);
}

/// op over all lanes, by halves. Each lane of the result has it.
template <int kStep = kLanes / 2, typename Op>
BRANCHLINE_INLINE U32 reduce(U32 v, Op op) {
    if constexpr (kStep == 0) {
        return v;
    } else {
        return reduce<kStep / 2>(op(v, swap_lanes<kStep>(v, std::make_integer_sequence<int, kLanes>())), op);
    }
}

BRANCHLINE_INLINE void store_codes(int8_t* p, I32 codes) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(codes, Bytes);
    std::memcpy(p, &bytes, sizeof bytes);
}

void quantise(const float* x, int64_t stride, int tokens, int64_t cols, PanelBlock* panel) {
    for (int64_t b = 0; b < cols / kCols; ++b) {
        PanelBlock& block = panel[b];
        if (tokens < kTokens) std::memset(static_cast<void*>(&block), 0, sizeof block);
        for (int t = 0; t < tokens; ++t) {
            const float* const from = x + t * stride + b * kCols;
            // Sizes compare as their bits do, with NaN above infinity above all numbers.
            U32 most = {};
            for (int i = 0; i < kCols; i += kLanes) {
                const U32 size = (U32)load(from + i) & 0x7fffffffu;
                most = size > most ? size : most;
            }
            const uint32_t bits = reduce(most, [](U32 u, U32 v) { return u > v ? u : v; })[0];
            float scale;
            std::memcpy(&scale, &bits, sizeof scale);
            scale /= 127.0f;
            const bool is_finite = bits < 0x7f800000u;
            // Below 2^-100 the inverse or the scale would leave the normal numbers; such a block is as good as zero.
            const bool is_zero = bits < 0x0d800000u;
            const float inverse = is_finite && !is_zero ? 1.0f / scale : 0.0f;
            int32_t sums[2] = {};
            for (int h = 0; h < 2; ++h) {
                I32 sum = {};
                for (int i = 16 * h; i < 16 * h + 16; i += kLanes) {
                    // Adding 1.5 * 2^23 rounds to a whole number, ties to even, which the low bits of the sum then are.
                    F32 v = load(from + i);
                    v = is_finite ? v : F32{};
                    const F32 rounded = v * inverse + broadcast(0x1.8p23f);
                    const I32 code = (I32)rounded - 0x4b400000;
                    sum += code;
                    store_codes(block.codes[t] + i, code);
                }
                sums[h] = static_cast<int32_t>(reduce((U32)sum, [](U32 u, U32 v) { return u + v; })[0]);
            }
            scale = is_zero ? 0.0f : is_finite ? scale : __builtin_nanf("");
            block.scales[t] = scale;
            block.sums[t] = scale * static_cast<float>(sums[0] + sums[1]);
            block.biases[t] = -128 * (sums[0] + sums[1]);
            block.half_biases[0][t] = -128 * sums[0];
            block.half_biases[1][t] = -128 * sums[1];
        }
    }
}

}  // namespace

const LinearKernels kLinear = {
    {quantised<Layout::u4>, quantised<Layout::u4_min>, quantised<Layout::u4_min_f32>, quantised<Layout::u8>,
     quantised<Layout::u8_min>, quantised<Layout::u8_min_f32>, quantised<Layout::u8_split_f32>},
    {exact<Layout::u4>, exact<Layout::u4_min>, exact<Layout::u4_min_f32>, exact<Layout::u8>, exact<Layout::u8_min>,
     exact<Layout::u8_min_f32>, exact<Layout::u8_split_f32>, exact<Layout::f32>, exact<Layout::f16>, exact<Layout::bf16>},
    write_store,
    write_add,
    write_silu,
    quantise,
};

}  // namespace branchline::kernels::BRANCHLINE_ISA_NAMESPACE
