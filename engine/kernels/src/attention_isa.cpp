// Tree attention of one unit: tiles of query rows, held in registers, over blocks of K/V. See attention_tile.hpp.
#if defined(__GNUC__) && !defined(__clang__)
// GCC takes the deliberately undefined operands of its own AVX-512 intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "attention_kernels.hpp"
#include "attention_tile.hpp"

namespace branchline::kernels {
namespace BRANCHLINE_ISA_NAMESPACE {
namespace {

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
    const int backward = (kLanes - u.phase) % kLanes;
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
        if (u.continues) {
            const float* from = u.out + token * u.out_stride + static_cast<int64_t>(head) * head_dim;
            for (int d = 0; d < stride; d += kLanes) store(out + r * stride + d, load_column<kPartial>(from + d, head_dim - d));
            sum[r] = rotate(load(u.lane_sums + (token * u.stat_stride + head) * kLanes), backward);
            largest[r] = u.max[token * u.stat_stride + head];
        }
        limits[r] = clamp(u.first_limit + token, 0, u.end);
        last = limits[r] > last ? limits[r] : last;
    }
    const int64_t block_bytes = static_cast<int64_t>(kBlock) * (head_dim * Storage::kBytes + Storage::kScaleBytes);
    Stretch here, next;
    locate(u, u.first_block, block_bytes, next);
    for (int begin = 0; begin < last; begin += kStretch) {
        const int num_tokens = last - begin < kStretch ? last - begin : kStretch;
        const int num_blocks = (num_tokens + kBlock - 1) / kBlock;
        here = next;
        locate(u, u.first_block + begin / kBlock + kStretchBlocks, block_bytes, next);
        score_all<Storage, R, N, Ahead>(queries, stride, here, next, 0, num_blocks, head_dim, scores);
        for (int r = 0; r < R; ++r)
            fade[r] = soften<Storage>(scores + r * kStretch, num_blocks, begin == 0 ? u.begin : 0, limits[r] - begin, here,
                                      head_dim, largest[r], sum[r]);
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
        const Vec by_position = rotate(sum[r], u.phase);
        if (u.goes_on) store(u.lane_sums + (token * u.stat_stride + head) * kLanes, by_position);
        u.sum[token * u.stat_stride + head] = sum_of(by_position);
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

/// The partial softmaxes of one token joined by their largest logits and sums, in the order of its slots, which is that of
/// positions.
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
                store(power, power_of_two(set1(m.max[at] - top)));
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

const AttentionKernels kAttention = {attend<Float32>, attend<Bfloat16>, attend<Int8>, merge};

}  // namespace BRANCHLINE_ISA_NAMESPACE
}  // namespace branchline::kernels
