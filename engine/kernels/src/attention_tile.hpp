// What a tile of query rows does with a stretch of K/V: scores, online softmax, weighted sum of V. For attention_isa.cpp.
//
// K has its tokens in the lanes: 16 tokens are one vector for each of the head's dimensions, so that scores come from
// broadcast queries without any sum across lanes; V has the head's dimensions in the lanes. A row's arithmetic is the same
// in a tile of any height: a row's result doesn't depend on who else is in its unit.
//
// Nor does it depend on how the K/V before it is cut into segments. Scores are each token's own. The softmax is taken
// relative to whole powers of two, so that rescaling is exact and it doesn't matter when the largest score was seen. V is
// added token by token in the order of positions, also within a pair of bfloat16; the weights are added in 16 sums, one for
// each position modulo 16. (Exact as long as a row's scores lie within about 100 powers of two; weights below that are lost.)
//
// Online softmax: Milakov and Gimelshein 2018; tiles of it: Dao et al. 2022, "FlashAttention".
#pragma once

#include "attention_kernels.hpp"
#include "attention_vec.hpp"

namespace branchline::kernels {
namespace BRANCHLINE_ISA_NAMESPACE {
namespace {

constexpr int kBlock = kLanes;  // tokens of a block of K or V
constexpr int kStretch = 128;   // tokens that one turn of the online softmax takes
constexpr int kStretchBlocks = kStretch / kBlock;
constexpr float kMasked = -1e30f;

#if defined(__AVX512BF16__)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

/// K block: [head_dim][16]. V block: [16][head_dim].
struct Float32 {
    static constexpr int kTokens = 1;  // of V beside each other in a lane
    static constexpr int kBytes = 4;
    static constexpr int kScaleBytes = 0;  // of a token
};
/// K block: [head_dim][16]. V block: [16][head_dim]. Then the tokens' scales, [16] floats.
struct Int8 {
    static constexpr int kTokens = 1;
    static constexpr int kBytes = 1;
    static constexpr int kScaleBytes = 4;
};
/// Pairs share a 32-bit lane. K block: [head_dim / 2][16][2 dimensions]. V block: [8][head_dim][2 tokens], the earlier token in
/// the upper half, which the machine's dot product adds first.
struct Bfloat16 {
    static constexpr int kTokens = 2;
    static constexpr int kBytes = 2;
    static constexpr int kScaleBytes = 0;
};

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename Storage>
constexpr bool kDots = kSame<Storage, Bfloat16> && kHasDot;

constexpr int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

#if defined(__AVX512BF16__)
/// (acc + upper halves' product) + lower halves' product, each rounded once.
BRANCHLINE_INLINE Vec dot(Vec acc, Vec a, Vec b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
/// 16 floats, rounded to bfloat16: 32 bytes.
BRANCHLINE_INLINE void store_bfloat16(float* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
/// The same, with the earlier one of each pair in the upper half.
BRANCHLINE_INLINE void store_pairs(float* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_rol_epi32((__m256i)_mm512_cvtneps_pbh(x), 16));
}
BRANCHLINE_INLINE Vec first_of_pair(Vec w) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
#else
BRANCHLINE_INLINE Vec dot(Vec acc, Vec, Vec) { return acc; }
BRANCHLINE_INLINE void store_bfloat16(float*, Vec) {}
BRANCHLINE_INLINE void store_pairs(float*, Vec) {}
BRANCHLINE_INLINE Vec first_of_pair(Vec w) { return w; }
#endif

/// A tile's view of the K/V of a stretch: where each block lies.
struct Stretch {
    const float* keys[kStretchBlocks];
    const float* values[kStretchBlocks];
};

BRANCHLINE_INLINE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

/// The stretch that begins with block `first` of the segment; behind its last block, that block again.
BRANCHLINE_INLINE void locate(const AttentionUnit& u, int first, int64_t block_bytes, Stretch& out) {
    for (int i = 0; i < kStretchBlocks; ++i) {
        const int block = clamp(first + i, 0, u.num_blocks - 1);
        const int page = block / u.blocks_per_page;
        const int64_t at = u.pages[page] * u.page_bytes + (block - page * u.blocks_per_page) * block_bytes;
        out.keys[i] = reinterpret_cast<const float*>(u.keys + at);
        out.values[i] = reinterpret_cast<const float*>(u.values + at);
    }
}

/// Bytes or floats, as a number of bytes from `base`.
BRANCHLINE_INLINE const int8_t* codes_of(const float* base) { return reinterpret_cast<const int8_t*>(base); }
BRANCHLINE_INLINE const float* scales_of(const float* base, int head_dim) {
    return reinterpret_cast<const float*>(codes_of(base) + kBlock * head_dim);
}

/// Bring a line into the second-level cache: a stretch of K and V may be all that the first level holds.
BRANCHLINE_INLINE void fetch(const float* p) { __builtin_prefetch(p, 0, 2); }

/// Scores of R rows with N blocks. queries: [R][padded]: floats, or pairs of bfloat16 (in half the row) where there are dots.
template <typename Storage, int R, int N, bool Ahead>
BRANCHLINE_INLINE void score(const float* queries, int query_stride, const float* const* keys, const float* const* next,
                             int head_dim, float* scores) {
    Vec acc[R][N];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) acc[r][j] = set1(0.0f);
    const int num_vectors = head_dim / Storage::kTokens;
    for (int d = 0; d < num_vectors; ++d) {
        Vec k[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            if constexpr (kSame<Storage, Int8>) {
                k[j] = load_int8(codes_of(keys[j]) + d * kLanes);
                if constexpr (Ahead) {
                    if (d % 4 == 0) fetch(next[j] + d / 4 * kLanes);
                }
            } else {
                k[j] = load(keys[j] + d * kLanes);
                if constexpr (Ahead) fetch(next[j] + d * kLanes);
            }
        }
        if constexpr (kSame<Storage, Float32> || kSame<Storage, Int8>) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Vec q = spread(queries[r * query_stride + d]);
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) acc[r][j] = fma(q, k[j], acc[r][j]);
            }
        } else if constexpr (kDots<Storage>) {
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Vec q = spread(queries[r * query_stride + d]);
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) acc[r][j] = dot(acc[r][j], q, k[j]);
            }
        } else {
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
                const Vec first = even(k[j]);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) acc[r][j] = fma(spread(queries[r * query_stride + 2 * d]), first, acc[r][j]);
                const Vec second = odd(k[j]);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) acc[r][j] = fma(spread(queries[r * query_stride + 2 * d + 1]), second, acc[r][j]);
            }
        }
    }
    if constexpr (kSame<Storage, Int8>) {
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            const Vec scale = load(scales_of(keys[j], head_dim));
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) acc[r][j] = mul(acc[r][j], scale);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) store(scores + r * kStretch + j * kLanes, acc[r][j]);
}

template <typename Storage, int R, int N, bool Ahead>
BRANCHLINE_INLINE void score_all(const float* queries, int query_stride, const Stretch& here, const Stretch& next, int begin,
                                 int end, int head_dim, float* scores) {
    int i = begin;
    for (; i + N <= end; i += N)
        score<Storage, R, N, Ahead>(queries, query_stride, here.keys + i, next.keys + i, head_dim, scores + i * kLanes);
    if constexpr (N > 1) score_all<Storage, R, N / 2, Ahead>(queries, query_stride, here, next, i, end, head_dim, scores);
}

template <bool Partial>
BRANCHLINE_INLINE Vec load_column(const float* p, int rest) {
    if constexpr (Partial) return load_first(p, rest < kLanes ? rest : kLanes);
    return load(p);
}

/// out = out * fade + weights · V, N vectors of the head's dimensions from `column` on.
template <typename Storage, int R, int N, bool Ahead, bool Partial>
BRANCHLINE_INLINE void accumulate(const float* weights, const Stretch& here, const Stretch& next, int num_tokens, int head_dim,
                                  int column, const float* fade, float* out, int out_stride) {
    Vec acc[R][N];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const Vec f = set1(fade[r]);
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) acc[r][j] = mul(load(out + r * out_stride + column + j * kLanes), f);
    }
    const int rest = head_dim - column;
    for (int i = 0; i * kBlock < num_tokens; ++i) {
        const float* v = here.values[i] + column;
        const float* ahead = next.values[i] + column;
        const int left = num_tokens - i * kBlock;
        const int count = left < kBlock ? left : kBlock;
        if constexpr (kSame<Storage, Int8>) {
            const float* w = weights + i * kBlock;
            const int8_t* codes = codes_of(here.values[i]) + column;
            const int8_t* codes_ahead = codes_of(next.values[i]) + column;
            for (int t = 0; t < count; ++t, codes += head_dim, codes_ahead += head_dim) {
                Vec x[N];
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) x[j] = load_int8(codes + j * kLanes);  // after its last one a token's block goes on
                if constexpr (Ahead) fetch(reinterpret_cast<const float*>(codes_ahead));
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Vec p = spread(w[r * kStretch + t]);
#pragma GCC unroll 4
                    for (int j = 0; j < N; ++j) acc[r][j] = fma(p, x[j], acc[r][j]);
                }
            }
        } else if constexpr (kSame<Storage, Float32>) {
            const float* w = weights + i * kBlock;
            for (int t = 0; t < count; ++t, v += head_dim, ahead += head_dim) {
                Vec x[N];
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) {
                    x[j] = load_column<Partial>(v + j * kLanes, rest - j * kLanes);
                    if constexpr (Ahead) fetch(ahead + j * kLanes);
                }
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Vec p = spread(w[r * kStretch + t]);
#pragma GCC unroll 4
                    for (int j = 0; j < N; ++j) acc[r][j] = fma(p, x[j], acc[r][j]);
                }
            }
        } else if constexpr (kDots<Storage>) {
            const float* w = weights + i * (kBlock / 2);  // pairs
            const int pairs = count / 2;
            for (int t = 0; t < pairs; ++t, v += head_dim, ahead += head_dim) {
                Vec x[N];
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) {
                    x[j] = load_column<Partial>(v + j * kLanes, rest - j * kLanes);
                    if constexpr (Ahead) fetch(ahead + j * kLanes);
                }
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const Vec p = spread(w[r * kStretch + t]);
#pragma GCC unroll 4
                    for (int j = 0; j < N; ++j) acc[r][j] = dot(acc[r][j], p, x[j]);
                }
            }
            if (count % 2 != 0) {  // the last token's partner isn't written yet
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) {
                    const Vec x = first_of_pair(load_column<Partial>(v + j * kLanes, rest - j * kLanes));
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) acc[r][j] = dot(acc[r][j], spread(w[r * kStretch + pairs]), x);
                }
            }
        } else {
            const float* w = weights + i * kBlock;
            for (int t = 0; t < count; t += 2, v += head_dim, ahead += head_dim) {
#pragma GCC unroll 4
                for (int j = 0; j < N; ++j) {
                    const Vec x = load_column<Partial>(v + j * kLanes, rest - j * kLanes);
                    if constexpr (Ahead) fetch(ahead + j * kLanes);
                    const Vec first = odd(x);
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) acc[r][j] = fma(set1(w[r * kStretch + t]), first, acc[r][j]);
                    if (t + 1 == count) continue;
                    const Vec second = even(x);
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) acc[r][j] = fma(set1(w[r * kStretch + t + 1]), second, acc[r][j]);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) store(out + r * out_stride + column + j * kLanes, acc[r][j]);
}

template <typename Storage, int R, int N, bool Ahead, bool Partial>
BRANCHLINE_INLINE void accumulate_all(const float* weights, const Stretch& here, const Stretch& next, int num_tokens,
                                      int head_dim, int column, const float* fade, float* out, int out_stride) {
    for (; column + N * kLanes <= out_stride; column += N * kLanes)
        accumulate<Storage, R, N, Ahead, Partial>(weights, here, next, num_tokens, head_dim, column, fade, out, out_stride);
    if constexpr (N > 1)
        accumulate_all<Storage, R, N / 2, Ahead, Partial>(weights, here, next, num_tokens, head_dim, column, fade, out,
                                                          out_stride);
}

/// The nearest whole number, of |x| < 2^22: adding 1.5 * 2^23 leaves no bits for the fraction. Greater ones stay.
BRANCHLINE_INLINE float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

/// One turn of a row's online softmax: scores [kStretch] become weights, of which those from `begin` (below 16) to before
/// `limit` count. `largest` becomes the nearest whole number to the largest score so far, `sum` the weights' in each lane.
/// The weights of int8 become those of the codes. Returns what earlier weights are to be multiplied with: a power of two.
template <typename Storage>
BRANCHLINE_INLINE float soften(float* scores, int num_blocks, int begin, int limit, const Stretch& here, int head_dim,
                               float& largest, Vec& sum) {
    Vec top = set1(kMasked);
    for (int i = 0; i < num_blocks; ++i) {
        Vec s = load(scores + i * kLanes);
        if (limit < (i + 1) * kLanes) s = first_lanes(limit - i * kLanes, s, set1(kMasked));
        if (i == 0 && begin > 0) s = first_lanes(begin, set1(kMasked), s);
        top = max(top, s);
    }
    const float before = largest;
    const float most = nearest(max_of(top));
    largest = most > before ? most : before;
    const Vec shift = set1(largest);
    const Vec fade = power_of_two(set1(before - largest));
    sum = mul(sum, fade);
    for (int i = 0; i < num_blocks; ++i) {
        Vec p = exp2(load(scores + i * kLanes), shift);
        if (limit < (i + 1) * kLanes) p = first_lanes(limit - i * kLanes, p, set1(0.0f));
        if (i == 0 && begin > 0) p = first_lanes(begin, set1(0.0f), p);
        sum = add(sum, p);
        if constexpr (kSame<Storage, Int8>) {
            p = mul(p, load(scales_of(here.values[i], head_dim)));
            if (limit < (i + 1) * kLanes) p = first_lanes(limit - i * kLanes, p, set1(0.0f));  // nobody wrote their scales
        }
        if constexpr (kDots<Storage>) {
            store_pairs(scores + i * (kLanes / 2), p);
        } else {
            store(scores + i * kLanes, p);
        }
    }
    float factor[kLanes];
    store(factor, fade);
    return factor[0];
}

/// Lane i becomes lane (i + by) % 16, 0 <= by < 16.
BRANCHLINE_INLINE Vec rotate(Vec x, int by) {
    float twice[2 * kLanes];
    store(twice, x);
    store(twice + kLanes, x);
    return load(twice + (kLanes - by) % kLanes);
}

}  // namespace
}  // namespace BRANCHLINE_ISA_NAMESPACE
}  // namespace branchline::kernels
