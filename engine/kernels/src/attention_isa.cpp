// Tree attention of one unit: tiles of query rows, held in registers, over blocks of K/V with an online softmax.
//
// K has its tokens in the lanes: 16 tokens are one vector for each of the head's dimensions, so that scores come from
// broadcast queries without any sum across lanes; V has the head's dimensions in the lanes. A row's arithmetic is the same
// in a tile of any height: a row's result doesn't depend on who else is in its unit.
//
// Online softmax: Milakov and Gimelshein 2018; tiles of it: Dao et al. 2022, "FlashAttention".
#if defined(__GNUC__) && !defined(__clang__)
// GCC takes the deliberately undefined operands of its own AVX-512 intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

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
};
/// Pairs share a 32-bit lane. K block: [head_dim / 2][16][2 dimensions]. V block: [8][head_dim][2 tokens].
struct Bfloat16 {
    static constexpr int kTokens = 2;
    static constexpr int kBytes = 2;
};

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename Storage>
constexpr bool kDots = kSame<Storage, Bfloat16> && kHasDot;

constexpr int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

#if defined(__AVX512BF16__)
BRANCHLINE_INLINE Vec dot(Vec acc, Vec a, Vec b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
/// 16 floats, rounded to bfloat16: 32 bytes.
BRANCHLINE_INLINE void store_bfloat16(float* p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
BRANCHLINE_INLINE Vec first_of_pair(Vec w) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(0xffff)));
}
#else
BRANCHLINE_INLINE Vec dot(Vec acc, Vec, Vec) { return acc; }
BRANCHLINE_INLINE void store_bfloat16(float*, Vec) {}
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
            k[j] = load(keys[j] + d * kLanes);
            if constexpr (Ahead) fetch(next[j] + d * kLanes);
        }
        if constexpr (kSame<Storage, Float32>) {
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
        if constexpr (kSame<Storage, Float32>) {
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
                    const Vec first = even(x);
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) acc[r][j] = fma(set1(w[r * kStretch + t]), first, acc[r][j]);
                    if (t + 1 == count) continue;
                    const Vec second = odd(x);
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

/// One turn of a row's online softmax: scores [kStretch] become weights, of which the first `limit` count.
template <typename Storage>
BRANCHLINE_INLINE float soften(float* scores, int num_blocks, int limit, float& largest, Vec& sum) {
    Vec top = set1(kMasked);
    for (int i = 0; i < num_blocks; ++i) {
        Vec s = load(scores + i * kLanes);
        if (limit < (i + 1) * kLanes) s = first_lanes(limit - i * kLanes, s, set1(kMasked));
        top = max(top, s);
    }
    const float before = largest;
    const float most = max_of(top);
    largest = most > before ? most : before;
    const Vec shift = set1(largest);
    const Vec fade = exp2(set1(before - largest));
    sum = mul(sum, fade);
    for (int i = 0; i < num_blocks; ++i) {
        Vec p = exp2(sub(load(scores + i * kLanes), shift));
        if (limit < (i + 1) * kLanes) p = first_lanes(limit - i * kLanes, p, set1(0.0f));
        sum = add(sum, p);
        if constexpr (kDots<Storage>) {
            store_bfloat16(scores + i * (kLanes / 2), p);
        } else {
            store(scores + i * kLanes, p);
        }
    }
    float factor[kLanes];
    store(factor, fade);
    return factor[0];
}

template <typename Storage, int HeadDim, int R, bool Ahead>
void attend_tile(const AttentionUnit& u, int first_row) {
    const int head_dim = HeadDim != 0 ? HeadDim : u.head_dim;
    const int stride = padded(head_dim);
    constexpr int kStride = HeadDim != 0 ? padded(HeadDim) : kMaxHeadDim;
    constexpr bool kPartial = HeadDim == 0;
    constexpr int N = vectors_for(R);
    alignas(64) float queries[R * kStride];
    alignas(64) float out[R * kStride];
    alignas(64) float scores[R * kStretch];
    Vec sum[R];
    float largest[R];
    float fade[R];
    int limits[R];
    int last = 0;
    for (int r = 0; r < R; ++r) {
        const int token = (first_row + r) / u.group, head = (first_row + r) % u.group;
        const float* q = u.q + token * u.q_stride + static_cast<int64_t>(head) * head_dim;
        for (int d = 0; d < stride; d += kLanes) {
            const Vec x = mul(load_column<kPartial>(q + d, head_dim - d), set1(u.scale));
            if constexpr (kDots<Storage>) {
                store_bfloat16(queries + r * stride + d / 2, x);
            } else {
                store(queries + r * stride + d, x);
            }
            store(out + r * stride + d, set1(0.0f));
        }
        sum[r] = set1(0.0f);
        largest[r] = kMasked;
        limits[r] = clamp(u.first_limit + token, 0, u.num_kv);
        last = limits[r] > last ? limits[r] : last;
    }
    const int64_t block_bytes = static_cast<int64_t>(kBlock) * head_dim * Storage::kBytes;
    Stretch here, next;
    locate(u, u.first_block, block_bytes, next);
    for (int begin = 0; begin < last; begin += kStretch) {
        const int num_tokens = last - begin < kStretch ? last - begin : kStretch;
        const int num_blocks = (num_tokens + kBlock - 1) / kBlock;
        here = next;
        locate(u, u.first_block + begin / kBlock + kStretchBlocks, block_bytes, next);
        score_all<Storage, R, N, Ahead>(queries, stride, here, next, 0, num_blocks, head_dim, scores);
        for (int r = 0; r < R; ++r)
            fade[r] = soften<Storage>(scores + r * kStretch, num_blocks, limits[r] - begin, largest[r], sum[r]);
        accumulate_all<Storage, R, N, Ahead, kPartial>(scores, here, next, num_tokens, head_dim, 0, fade, out, stride);
    }
    for (int r = 0; r < R; ++r) {
        const int token = (first_row + r) / u.group, head = (first_row + r) % u.group;
        float* to = u.out + token * u.out_stride + static_cast<int64_t>(head) * head_dim;
        if constexpr (HeadDim != 0) {
            for (int d = 0; d < HeadDim; d += kLanes) store(to + d, load(out + r * stride + d));
        } else {
            for (int d = 0; d < head_dim; ++d) to[d] = out[r * stride + d];
        }
        u.max[token * u.stat_stride + head] = largest[r];
        u.sum[token * u.stat_stride + head] = sum_of(sum[r]);
    }
}

/// A tile of R rows or fewer that also brings K and V into the cache, each stretch while the one before it is computed.
template <typename Storage, int HeadDim, int R>
BRANCHLINE_INLINE void attend_ahead(const AttentionUnit& u, int first_row, int rows) {
    if (rows == R) return attend_tile<Storage, HeadDim, R, true>(u, first_row);
    if constexpr (R > 1) attend_ahead<Storage, HeadDim, R - 1>(u, first_row, rows);
}

template <typename Storage, int HeadDim>
void attend_unit(const AttentionUnit& u) {
    const int num_rows = u.num_queries * u.group;
    attend_ahead<Storage, HeadDim, kTileRows>(u, 0, num_rows < kTileRows ? num_rows : kTileRows);
    int row = kTileRows;
    for (; row + kTileRows <= num_rows; row += kTileRows) attend_tile<Storage, HeadDim, kTileRows, HeadDim == 0>(u, row);
    if (row < num_rows) attend_ahead<Storage, HeadDim, kTileRows - 1>(u, row, num_rows - row);
}

template <typename Storage>
void attend(const AttentionUnit& u) {
    if (u.head_dim == 64) return attend_unit<Storage, 64>(u);
    if (u.head_dim == 128) return attend_unit<Storage, 128>(u);
    attend_unit<Storage, 0>(u);
}

/// The partial softmaxes of one token joined by their largest logits and sums, in the order of its slots.
void merge(const AttentionMerge& m) {
    for (int head = 0; head < m.num_heads; ++head) {
        float top = kMasked;
        for (int i = 0; i < m.num_slots; ++i) {
            const float x = m.max[static_cast<int64_t>(m.slots[i]) * m.num_heads + head];
            top = x > top ? x : top;
        }
        constexpr int kAtOnce = 16;
        float total = 0.0f;
        float* out = m.out + static_cast<int64_t>(head) * m.head_dim;
        for (int first = 0; first < m.num_slots; first += kAtOnce) {
            const int count = m.num_slots - first < kAtOnce ? m.num_slots - first : kAtOnce;
            float weights[kAtOnce];
            const float* from[kAtOnce];
            for (int i = 0; i < count; ++i) {
                const int64_t at = static_cast<int64_t>(m.slots[first + i]) * m.num_heads + head;
                float power[kLanes];
                store(power, exp2(set1(m.max[at] - top)));
                weights[i] = m.sum[at] > 0.0f || m.sum[at] != m.sum[at] ? power[0] : 0.0f;
                total += weights[i] * m.sum[at];
                from[i] = m.partials + at * m.head_dim;
            }
            const float factor = first + kAtOnce >= m.num_slots ? 1.0f / total : 1.0f;
            int d = 0;
            for (; d + kLanes <= m.head_dim; d += kLanes) {
                Vec x = first == 0 ? set1(0.0f) : load(out + d);
                for (int i = 0; i < count; ++i) x = fma(set1(weights[i]), load(from[i] + d), x);
                store(out + d, mul(x, set1(factor)));
            }
            for (; d < m.head_dim; ++d) {
                float x = first == 0 ? 0.0f : out[d];
                for (int i = 0; i < count; ++i) x += weights[i] * from[i][d];
                out[d] = x * factor;
            }
        }
    }
}

}  // namespace

const AttentionKernels kAttention = {attend<Float32>, attend<Bfloat16>, merge};

}  // namespace BRANCHLINE_ISA_NAMESPACE
}  // namespace branchline::kernels
