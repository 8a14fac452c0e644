#include "branchline/kernels/attention.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "attention_kernels.hpp"
#include "attention_plan.hpp"
#include "branchline/kernels/isa.hpp"

namespace branchline::kernels {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

uint16_t to_bfloat16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// The nearest codes of x [size], from -127 to 127. Returns their scale; not a number, with codes 0, if one of x isn't finite.
float round_to_codes(const float* x, int64_t size, int8_t* codes) {
    float most = 0.0f;
    bool is_finite = true;
    for (int64_t d = 0; d < size; ++d) {
        most = std::max(most, std::fabs(x[d]));
        is_finite &= std::isfinite(x[d]);
    }
    const float scale = most / 127.0f;
    // Below 2^-100 the inverse or the scale would leave the normal numbers; such a vector is as good as zero.
    const bool is_zero = most < 0x1p-100f;
    const float inverse = is_finite && !is_zero ? 1.0f / scale : 0.0f;
    for (int64_t d = 0; d < size; ++d) {
        const float value = is_finite ? x[d] : 0.0f;
        codes[d] = static_cast<int8_t>((value * inverse + 12582912.0f) - 12582912.0f);  // 1.5 * 2^23: no fraction is left
    }
    return !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0.0f : scale;
}

bool multiplies_bfloat16() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

const AttentionKernels& kernels_of(const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "avx512bf16") return avx512bf16::kAttention;
    return select_isa(require_isa(isa), baseline::kAttention, avx2::kAttention, avx512::kAttention);
#elif defined(__aarch64__)
    return select_isa(require_isa(isa), baseline::kAttention, dotprod::kAttention);
#else
    return select_isa(require_isa(isa), baseline::kAttention);
#endif
}

std::string choose_isa(const std::string& wanted) {
    if (wanted.empty()) {
        const Isa best = default_isa();
        return best == Isa::avx512 && multiplies_bfloat16() ? "avx512bf16" : std::string(name(best));
    }
    if (wanted != "avx512bf16") return std::string(name(require_isa(wanted)));
    require_isa("avx512");
    if (!multiplies_bfloat16()) throw std::invalid_argument("instruction set avx512bf16 is not available on this machine");
    return wanted;
}

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_shape(const AttentionShape& s) {
    require(s.num_layers >= 1 && s.num_kv_heads >= 1 && s.num_heads >= 1, "layers and heads must be at least 1");
    require(s.num_heads % s.num_kv_heads == 0, "num_heads = " + std::to_string(s.num_heads) +
                                                   " must be a multiple of num_kv_heads = " + std::to_string(s.num_kv_heads));
    require(s.head_dim >= 8 && s.head_dim % 8 == 0 && s.head_dim <= kMaxHeadDim,
            "head_dim = " + std::to_string(s.head_dim) + " must be a multiple of 8 of at most " + std::to_string(kMaxHeadDim));
    require(s.page_tokens >= kBlock && s.page_tokens % kBlock == 0,
            "page_tokens = " + std::to_string(s.page_tokens) + " must be a multiple of 16");
}

}  // namespace

KvType require_kv_type(const std::string& name) {
    if (name == "float32") return KvType::float32;
    if (name == "bfloat16") return KvType::bfloat16;
    if (name == "int8") return KvType::int8;
    throw std::invalid_argument("kv_dtype '" + name + "': expected float32, bfloat16 or int8");
}

int64_t AttentionShape::token_bytes() const {
    switch (kv_type) {
        case KvType::float32: return int64_t{head_dim} * 4;
        case KvType::bfloat16: return int64_t{head_dim} * 2;
        case KvType::int8: return int64_t{head_dim} + 4;
    }
    return 0;
}

int64_t AttentionShape::page_bytes() const { return int64_t{num_layers} * 2 * num_kv_heads * page_tokens * token_bytes(); }

std::vector<std::string> attention_isas() {
    std::vector<std::string> out;
    for (const Isa isa : available_isas()) out.emplace_back(name(isa));
    if (out.back() == "avx512" && multiplies_bfloat16()) out.emplace_back("avx512bf16");
    return out;
}

struct TreeAttention::State {
    AttentionShape shape;
    std::string isa;
    const AttentionKernels* kernels;

    AttentionPlan plan;

    // Partial results of a layer: [slots, num_heads, head_dim], [slots, num_heads] and [slots, num_heads, 16].
    std::vector<float> partials;
    std::vector<float> max;
    std::vector<float> sum;
    std::vector<float> lane_sums;

    void write(int layer, int64_t token, int kv_head, const float* k, const float* v, std::byte* pool) const;
    void attend_unit(const PlannedUnit& unit, int layer, const float* q, int64_t q_stride, const float* k, const float* v,
                     int64_t kv_stride, std::byte* pool);
};

TreeAttention::TreeAttention(const AttentionShape& shape, const std::string& isa) : state_(std::make_unique<State>()) {
    check_shape(shape);
    state_->shape = shape;
    state_->isa = choose_isa(isa);
    state_->kernels = &kernels_of(state_->isa);
}

TreeAttention::~TreeAttention() = default;
TreeAttention::TreeAttention(TreeAttention&&) noexcept = default;

const AttentionShape& TreeAttention::shape() const { return state_->shape; }
const std::string& TreeAttention::isa() const { return state_->isa; }
int64_t TreeAttention::num_tokens() const { return state_->plan.num_tokens; }
int64_t TreeAttention::num_pages() const { return state_->plan.num_pages; }

void TreeAttention::plan(std::span<const int32_t> write_slots, std::span<const int32_t> row_indptr,
                         std::span<const AttentionLevel> levels, int64_t num_pages) {
    State& s = *state_;
    s.plan.make(s.shape, write_slots, row_indptr, levels, num_pages);
    const size_t num_rows = static_cast<size_t>(s.plan.num_slots) * static_cast<size_t>(s.shape.num_heads);
    s.partials.resize(num_rows * static_cast<size_t>(s.shape.head_dim));
    s.max.resize(num_rows);
    s.sum.resize(num_rows);
    s.lane_sums.resize(num_rows * kBlock);
}

/// One token's K and V of one head into its block.
void TreeAttention::State::write(int layer, int64_t token, int kv_head, const float* k, const float* v, std::byte* pool) const {
    const int64_t slot = plan.write_slots[static_cast<size_t>(token)];
    const int64_t page = slot / shape.page_tokens, offset = slot % shape.page_tokens;
    const int64_t block = offset / kBlock, lane = offset % kBlock, head_dim = shape.head_dim;
    const int64_t head_bytes = shape.page_tokens * shape.token_bytes();
    std::byte* const keys = pool + page * shape.page_bytes() +
                            (int64_t{layer} * 2 * shape.num_kv_heads + kv_head) * head_bytes +
                            block * kBlock * shape.token_bytes();
    std::byte* const values = keys + shape.num_kv_heads * head_bytes;
    if (shape.kv_type == KvType::float32) {
        auto* const to_k = reinterpret_cast<float*>(keys) + lane;
        for (int64_t d = 0; d < head_dim; ++d) to_k[d * kBlock] = k[d];
        std::memcpy(values + lane * head_dim * 4, v, static_cast<size_t>(head_dim) * 4);
        return;
    }
    if (shape.kv_type == KvType::int8) {
        int8_t codes[kMaxHeadDim];
        auto* const to_k = reinterpret_cast<int8_t*>(keys) + lane;
        reinterpret_cast<float*>(keys + kBlock * head_dim)[lane] = round_to_codes(k, head_dim, codes);
        for (int64_t d = 0; d < head_dim; ++d) to_k[d * kBlock] = codes[d];
        auto* const to_v = reinterpret_cast<int8_t*>(values) + lane * head_dim;
        reinterpret_cast<float*>(values + kBlock * head_dim)[lane] = round_to_codes(v, head_dim, to_v);
        return;
    }
    auto* const to_k = reinterpret_cast<uint16_t*>(keys) + lane * 2;
    for (int64_t d = 0; d < head_dim; d += 2) {
        to_k[d * kBlock] = to_bfloat16(k[d]);
        to_k[d * kBlock + 1] = to_bfloat16(k[d + 1]);
    }
    auto* const to_v = reinterpret_cast<uint16_t*>(values) + lane / 2 * head_dim * 2 + (1 - lane % 2);
    for (int64_t d = 0; d < head_dim; ++d) to_v[d * 2] = to_bfloat16(v[d]);
}

void TreeAttention::State::attend_unit(const PlannedUnit& unit, int layer, const float* q, int64_t q_stride, const float* k,
                                       const float* v, int64_t kv_stride, std::byte* pool) {
    const AttentionItem& item = plan.items[static_cast<size_t>(unit.item)];
    const int group = shape.num_heads / shape.num_kv_heads;
    const int64_t head = unit.kv_head, first_head = head * group, head_dim = shape.head_dim;
    if (item.writes) {
        const int64_t at = item.first_token * kv_stride + head * head_dim;
        write(layer, item.first_token, unit.kv_head, k + at, v + at, pool);
    }
    const int64_t page_bytes = shape.page_bytes();
    const int64_t head_bytes = page_bytes / (int64_t{shape.num_layers} * 2 * shape.num_kv_heads);
    const std::byte* const keys = pool + (int64_t{layer} * 2 * shape.num_kv_heads + head) * head_bytes;
    const int64_t row = int64_t{item.slot} * shape.num_heads + first_head;
    const AttentionUnit args = {
        .q = q + item.first_token * q_stride + first_head * head_dim,
        .q_stride = q_stride,
        .keys = keys,
        .values = keys + shape.num_kv_heads * head_bytes,
        .page_bytes = page_bytes,
        .pages = plan.pages.data() + item.first_page,
        .blocks_per_page = shape.page_tokens / kBlock,
        .first_block = item.first_block,
        .num_blocks = item.num_blocks,
        .num_queries = item.num_queries,
        .group = group,
        .head_dim = shape.head_dim,
        .begin = item.begin,
        .end = item.end,
        .first_limit = item.first_limit,
        .phase = item.phase,
        .continues = item.continues,
        .goes_on = item.goes_on,
        .scale = shape.scale * kLog2E,
        .out = partials.data() + row * head_dim,
        .out_stride = shape.num_heads * head_dim,
        .max = max.data() + row,
        .sum = sum.data() + row,
        .lane_sums = lane_sums.data() + row * kBlock,
        .stat_stride = shape.num_heads,
    };
    switch (shape.kv_type) {
        case KvType::float32: return kernels->attend_float32(args);
        case KvType::bfloat16: return kernels->attend_bfloat16(args);
        case KvType::int8: return kernels->attend_int8(args);
    }
}

void TreeAttention::attend(int layer, const float* q, int64_t q_stride, const float* k, const float* v, int64_t kv_stride,
                           float* out, int64_t out_stride, std::byte* pool, ThreadPool& threads) {
    State& s = *state_;
    const AttentionShape& shape = s.shape;
    require(layer >= 0 && layer < shape.num_layers, "layer " + std::to_string(layer) + " is not one of the model's");
    constexpr int64_t kTokensAtOnce = 16;
    const auto for_tokens = [&](int64_t count, auto fn) {
        threads.parallel_for((count + kTokensAtOnce - 1) / kTokensAtOnce, [&](int64_t part) {
            const int64_t end = std::min(count, (part + 1) * kTokensAtOnce);
            for (int64_t i = part * kTokensAtOnce; i < end; ++i) fn(i);
        });
    };
    const AttentionPlan& plan = s.plan;
    for_tokens(static_cast<int64_t>(plan.early_writes.size()), [&](int64_t i) {
        const int64_t token = plan.early_writes[static_cast<size_t>(i)];
        for (int head = 0; head < shape.num_kv_heads; ++head) {
            const int64_t at = token * kv_stride + int64_t{head} * shape.head_dim;
            s.write(layer, token, head, k + at, v + at, pool);
        }
    });
    for (size_t wave = 0; wave + 1 < plan.wave_indptr.size(); ++wave) {
        const int64_t first = plan.wave_indptr[wave];
        threads.parallel_for(plan.wave_indptr[wave + 1] - first, [&](int64_t task) {
            const auto begin = static_cast<size_t>(plan.task_indptr[static_cast<size_t>(first + task)]);
            const auto end = static_cast<size_t>(plan.task_indptr[static_cast<size_t>(first + task) + 1]);
            for (size_t i = begin; i < end; ++i) s.attend_unit(plan.units[i], layer, q, q_stride, k, v, kv_stride, pool);
        });
    }
    for_tokens(plan.num_tokens, [&](int64_t token) {
        const int32_t first = plan.slot_indptr[static_cast<size_t>(token)];
        const AttentionMerge args = {.partials = s.partials.data(),
                                     .max = s.max.data(),
                                     .sum = s.sum.data(),
                                     .slots = plan.slots.data() + first,
                                     .num_slots = plan.slot_indptr[static_cast<size_t>(token) + 1] - first,
                                     .num_heads = shape.num_heads,
                                     .head_dim = shape.head_dim,
                                     .out = out + token * out_stride};
        s.kernels->merge(args);
    });
}

}  // namespace branchline::kernels
