#include "branchline/kernels/attention.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "attention_kernels.hpp"
#include "branchline/kernels/isa.hpp"

namespace branchline::kernels {
namespace {

constexpr int kBlock = 16;
constexpr int kSplit = 512;  // tokens of K/V that a unit takes
constexpr int kUnitRows = 384;  // query rows of a unit, about: what shares the split's K/V from a core's cache
constexpr int64_t kTaskCost = 400'000;  // multiply-adds of a task, at least: about 10 µs
constexpr float kLog2E = 1.44269504088896340736f;

/// A run of a segment's K/V and the query tokens that see it.
struct Item {
    int64_t first_page;  // of its segment, in the plan's pages
    int32_t num_blocks;  // of its segment
    int32_t first_block;  // of the run, in its segment
    int32_t num_kv;
    int32_t first_limit;
    int32_t first_token;
    int32_t num_queries;
    int32_t slot;  // of its first token's partial result
    bool writes;  // it is all of a decode row's tail, and writes the row's token first
};

struct Unit {
    int32_t item;
    int32_t kv_head;
};

uint16_t to_bfloat16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
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

int64_t AttentionShape::page_bytes() const {
    return int64_t{num_layers} * 2 * num_kv_heads * page_tokens * head_dim * (kv_type == KvType::float32 ? 4 : 2);
}

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

    // The plan.
    int64_t num_tokens = 0;
    int64_t num_pages = 0;
    int32_t num_slots = 0;
    std::vector<int32_t> write_slots;
    std::vector<int32_t> early_writes;  // tokens that must be written before any unit starts
    std::vector<int32_t> pages;
    std::vector<Item> items;
    std::vector<Unit> units;
    std::vector<int32_t> task_indptr;  // task i does units [task_indptr[i], task_indptr[i + 1])
    std::vector<int32_t> slot_indptr;  // token t's partial results are at slots[slot_indptr[t] : slot_indptr[t + 1]]
    std::vector<int32_t> slots;

    // Partial results of a layer: [num_slots, num_heads, head_dim] and [num_slots, num_heads].
    std::vector<float> partials;
    std::vector<float> max;
    std::vector<float> sum;

    void add_group(int64_t first_page, int32_t num_kv, int32_t begin, int32_t end, bool is_tail);
    void share_out();
    void write(int layer, int64_t token, int kv_head, const float* k, const float* v, std::byte* pool) const;
    void attend_unit(const Unit& unit, int layer, const float* q, int64_t q_stride, const float* k, const float* v,
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
int64_t TreeAttention::num_tokens() const { return state_->num_tokens; }
int64_t TreeAttention::num_pages() const { return state_->num_pages; }

void TreeAttention::plan(std::span<const int32_t> write_slots, std::span<const int32_t> row_indptr,
                         std::span<const AttentionLevel> levels, int64_t num_pages) {
    State& s = *state_;
    const auto num_tokens = static_cast<int64_t>(write_slots.size());
    s.num_tokens = 0;
    s.items.clear();
    s.pages.clear();
    s.early_writes.clear();
    s.num_slots = 0;
    require(!levels.empty() && !row_indptr.empty() && row_indptr.front() == 0 && row_indptr.back() == num_tokens,
            "a step has at least one level, and row_indptr goes from 0 to its number of tokens");
    const int64_t capacity = num_pages * s.shape.page_tokens;
    for (const int32_t slot : write_slots)
        require(slot >= 0 && slot < capacity, "write slot " + std::to_string(slot) + " is outside the pool");
    for (size_t l = 0; l < levels.size(); ++l) {
        const AttentionLevel& level = levels[l];
        const size_t num_groups = level.last_page_len.size();
        const bool is_tail = l + 1 == levels.size();
        require(level.qo_indptr.size() == num_groups + 1 && level.kv_indptr.size() == num_groups + 1 &&
                    level.qo_indptr.front() == 0 && level.qo_indptr.back() == num_tokens && level.kv_indptr.front() == 0 &&
                    level.kv_indptr.back() <= static_cast<int64_t>(level.kv_indices.size()),
                "level " + std::to_string(l) + ": its arrays contradict each other or the step");
        require(!is_tail || std::equal(row_indptr.begin(), row_indptr.end(), level.qo_indptr.begin(), level.qo_indptr.end()),
                "the last level's groups must be the step's rows");
        const auto offset = static_cast<int64_t>(s.pages.size());
        s.pages.insert(s.pages.end(), level.kv_indices.begin(), level.kv_indices.begin() + level.kv_indptr.back());
        for (size_t g = 0; g < num_groups; ++g) {
            const int32_t begin = level.qo_indptr[g], end = level.qo_indptr[g + 1];
            const int32_t listed = level.kv_indptr[g + 1] - level.kv_indptr[g];
            const int32_t last = level.last_page_len[g];
            require(begin <= end && listed >= 0 && last >= 0 && last <= s.shape.page_tokens,
                    "level " + std::to_string(l) + ", group " + std::to_string(g) + ": its numbers aren't in order");
            const int32_t num_kv = listed == 0 ? 0 : (listed - 1) * s.shape.page_tokens + last;
            require(!is_tail || num_kv >= end - begin, "a row's tail must hold its new tokens");
            if (begin < end && num_kv > 0) s.add_group(offset + level.kv_indptr[g], num_kv, begin, end, is_tail);
        }
    }
    for (const int32_t page : s.pages)
        require(page >= 0 && page < num_pages, "page " + std::to_string(page) + " is outside the pool");
    s.write_slots.assign(write_slots.begin(), write_slots.end());
    s.num_pages = num_pages;
    s.num_tokens = num_tokens;
    s.share_out();
}

void TreeAttention::State::add_group(int64_t first_page, int32_t num_kv, int32_t begin, int32_t end, bool is_tail) {
    const int32_t num_new = end - begin;
    const bool writes = is_tail && num_new == 1 && num_kv <= kSplit;
    if (is_tail && !writes)
        for (int32_t token = begin; token < end; ++token) early_writes.push_back(token);
    const int32_t at_once = std::max(1, kUnitRows / (shape.num_heads / shape.num_kv_heads));
    for (int32_t from = 0; from < num_kv; from += kSplit) {
        const int32_t here = std::min(kSplit, num_kv - from);
        for (int32_t first = begin; first < end; first += at_once) {
            const int32_t count = std::min(at_once, end - first);
            // A row's i-th of n new tokens sees all but the last n - 1 - i of its tail.
            const int32_t first_limit = is_tail ? num_kv - num_new + 1 + (first - begin) - from : here;
            if (first_limit + count - 1 <= 0) continue;
            items.push_back({.first_page = first_page,
                             .num_blocks = (num_kv + kBlock - 1) / kBlock,
                             .first_block = from / kBlock,
                             .num_kv = here,
                             .first_limit = first_limit,
                             .first_token = first,
                             .num_queries = count,
                             .slot = num_slots,
                             .writes = writes});
            num_slots += count;
        }
    }
}

/// Cut the items into units and tasks, number the partial results of each token. None of it depends on the number of threads.
void TreeAttention::State::share_out() {
    units.clear();
    task_indptr.assign(1, 0);
    const int32_t num_items = static_cast<int32_t>(items.size()), num_heads = shape.num_kv_heads;
    int64_t cost = 0;
    for (int32_t first = 0, next = 0; first < num_items; first = next) {
        // The splits of one long segment: head by head, so that one split's table goes on where the last one's ended.
        const Item& item = items[static_cast<size_t>(first)];
        next = first + 1;
        while (next < num_items && items[static_cast<size_t>(next)].first_page == item.first_page) ++next;
        for (int32_t head = 0; head < num_heads; ++head) {
            for (int32_t i = first; i < next; ++i) {
                const Item& each = items[static_cast<size_t>(i)];
                units.push_back({i, head});
                cost += int64_t{each.num_kv} * shape.head_dim * (8 + 2 * each.num_queries * shape.num_heads / num_heads);
                if (cost < kTaskCost) continue;
                task_indptr.push_back(static_cast<int32_t>(units.size()));
                cost = 0;
            }
        }
    }
    if (task_indptr.back() != static_cast<int32_t>(units.size())) task_indptr.push_back(static_cast<int32_t>(units.size()));

    slot_indptr.assign(static_cast<size_t>(num_tokens) + 1, 0);
    for (const Item& item : items)
        for (int32_t i = 0; i < item.num_queries; ++i) ++slot_indptr[static_cast<size_t>(item.first_token + i) + 1];
    for (size_t t = 1; t < slot_indptr.size(); ++t) slot_indptr[t] += slot_indptr[t - 1];
    slots.resize(static_cast<size_t>(num_slots));
    for (const Item& item : items)
        for (int32_t i = 0; i < item.num_queries; ++i)
            slots[static_cast<size_t>(slot_indptr[static_cast<size_t>(item.first_token + i)]++)] = item.slot + i;
    for (size_t t = slot_indptr.size() - 1; t > 0; --t) slot_indptr[t] = slot_indptr[t - 1];
    slot_indptr[0] = 0;

    const size_t num_rows = static_cast<size_t>(num_slots) * static_cast<size_t>(shape.num_heads);
    partials.resize(num_rows * static_cast<size_t>(shape.head_dim));
    max.resize(num_rows);
    sum.resize(num_rows);
}

/// One token's K and V of one head into its block.
void TreeAttention::State::write(int layer, int64_t token, int kv_head, const float* k, const float* v, std::byte* pool) const {
    const int64_t slot = write_slots[static_cast<size_t>(token)];
    const int64_t page = slot / shape.page_tokens, offset = slot % shape.page_tokens;
    const int64_t block = offset / kBlock, lane = offset % kBlock, head_dim = shape.head_dim;
    const int64_t element = shape.kv_type == KvType::float32 ? 4 : 2;
    const int64_t head_bytes = shape.page_tokens * head_dim * element;
    std::byte* const keys = pool + page * shape.page_bytes() + (int64_t{layer} * 2 * shape.num_kv_heads + kv_head) * head_bytes +
                            block * kBlock * head_dim * element;
    std::byte* const values = keys + shape.num_kv_heads * head_bytes;
    if (shape.kv_type == KvType::float32) {
        auto* const to_k = reinterpret_cast<float*>(keys) + lane;
        for (int64_t d = 0; d < head_dim; ++d) to_k[d * kBlock] = k[d];
        std::memcpy(values + lane * head_dim * element, v, static_cast<size_t>(head_dim * element));
        return;
    }
    auto* const to_k = reinterpret_cast<uint16_t*>(keys) + lane * 2;
    for (int64_t d = 0; d < head_dim; d += 2) {
        to_k[d * kBlock] = to_bfloat16(k[d]);
        to_k[d * kBlock + 1] = to_bfloat16(k[d + 1]);
    }
    auto* const to_v = reinterpret_cast<uint16_t*>(values) + lane / 2 * head_dim * 2 + lane % 2;
    for (int64_t d = 0; d < head_dim; ++d) to_v[d * 2] = to_bfloat16(v[d]);
}

void TreeAttention::State::attend_unit(const Unit& unit, int layer, const float* q, int64_t q_stride, const float* k,
                                       const float* v, int64_t kv_stride, std::byte* pool) {
    const Item& item = items[static_cast<size_t>(unit.item)];
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
        .pages = pages.data() + item.first_page,
        .blocks_per_page = shape.page_tokens / kBlock,
        .first_block = item.first_block,
        .num_blocks = item.num_blocks,
        .num_queries = item.num_queries,
        .group = group,
        .head_dim = shape.head_dim,
        .num_kv = item.num_kv,
        .first_limit = item.first_limit,
        .scale = shape.scale * kLog2E,
        .out = partials.data() + row * head_dim,
        .out_stride = shape.num_heads * head_dim,
        .max = max.data() + row,
        .sum = sum.data() + row,
        .stat_stride = shape.num_heads,
    };
    (shape.kv_type == KvType::float32 ? kernels->attend_float32 : kernels->attend_bfloat16)(args);
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
    for_tokens(static_cast<int64_t>(s.early_writes.size()), [&](int64_t i) {
        const int64_t token = s.early_writes[static_cast<size_t>(i)];
        for (int head = 0; head < shape.num_kv_heads; ++head) {
            const int64_t at = token * kv_stride + int64_t{head} * shape.head_dim;
            s.write(layer, token, head, k + at, v + at, pool);
        }
    });
    threads.parallel_for(static_cast<int64_t>(s.task_indptr.size()) - 1, [&](int64_t task) {
        const auto begin = static_cast<size_t>(s.task_indptr[static_cast<size_t>(task)]);
        const auto end = static_cast<size_t>(s.task_indptr[static_cast<size_t>(task) + 1]);
        for (size_t i = begin; i < end; ++i) s.attend_unit(s.units[i], layer, q, q_stride, k, v, kv_stride, pool);
    });
    for_tokens(s.num_tokens, [&](int64_t token) {
        const int32_t first = s.slot_indptr[static_cast<size_t>(token)];
        const AttentionMerge args = {.partials = s.partials.data(),
                                     .max = s.max.data(),
                                     .sum = s.sum.data(),
                                     .slots = s.slots.data() + first,
                                     .num_slots = s.slot_indptr[static_cast<size_t>(token) + 1] - first,
                                     .num_heads = shape.num_heads,
                                     .head_dim = shape.head_dim,
                                     .out = out + token * out_stride};
        s.kernels->merge(args);
    });
}

}  // namespace branchline::kernels
