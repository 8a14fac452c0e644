#include "attention_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace branchline::kernels {
namespace {

constexpr int32_t kSplit = 512;  // tokens of K/V that a unit takes
constexpr int32_t kUnitRows = 384;  // query rows of a unit, about: what shares the split's K/V from a core's cache
constexpr int64_t kTaskCost = 400'000;  // multiply-adds of a task, at least: about 10 µs

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

}  // namespace

void AttentionPlan::make(const AttentionShape& shape, std::span<const int32_t> new_write_slots,
                         std::span<const int32_t> row_indptr, std::span<const AttentionLevel> levels, int64_t pool_pages) {
    const auto count = static_cast<int64_t>(new_write_slots.size());
    num_tokens = 0;
    num_slots = 0;
    items.clear();
    pages.clear();
    early_writes.clear();
    require(!levels.empty() && !row_indptr.empty() && row_indptr.front() == 0 && row_indptr.back() == count,
            "a step has at least one level, and row_indptr goes from 0 to its number of tokens");
    const int64_t capacity = pool_pages * shape.page_tokens;
    for (const int32_t slot : new_write_slots)
        require(slot >= 0 && slot < capacity, "write slot " + std::to_string(slot) + " is outside the pool");
    past_.assign(static_cast<size_t>(count), 0);
    last_item_.assign(static_cast<size_t>(count), -1);
    last_slot_.assign(static_cast<size_t>(count), -1);
    for (size_t l = 0; l < levels.size(); ++l) {
        const AttentionLevel& level = levels[l];
        const size_t num_groups = level.last_page_len.size();
        const bool is_tail = l + 1 == levels.size();
        require(level.qo_indptr.size() == num_groups + 1 && level.kv_indptr.size() == num_groups + 1 &&
                    level.qo_indptr.front() == 0 && level.qo_indptr.back() == count && level.kv_indptr.front() == 0 &&
                    level.kv_indptr.back() <= static_cast<int64_t>(level.kv_indices.size()),
                "level " + std::to_string(l) + ": its arrays contradict each other or the step");
        require(!is_tail || std::equal(row_indptr.begin(), row_indptr.end(), level.qo_indptr.begin(), level.qo_indptr.end()),
                "the last level's groups must be the step's rows");
        const auto offset = static_cast<int64_t>(pages.size());
        pages.insert(pages.end(), level.kv_indices.begin(), level.kv_indices.begin() + level.kv_indptr.back());
        for (size_t g = 0; g < num_groups; ++g) {
            const int32_t begin = level.qo_indptr[g], end = level.qo_indptr[g + 1];
            const int32_t listed = level.kv_indptr[g + 1] - level.kv_indptr[g];
            const int32_t last = level.last_page_len[g];
            require(begin <= end && listed >= 0 && last >= 0 && last <= shape.page_tokens,
                    "level " + std::to_string(l) + ", group " + std::to_string(g) + ": its numbers aren't in order");
            const int32_t num_kv = listed == 0 ? 0 : (listed - 1) * shape.page_tokens + last;
            require(!is_tail || num_kv >= end - begin, "a row's tail must hold its new tokens");
            if (begin < end && num_kv > 0) add_group(shape, {offset + level.kv_indptr[g], num_kv, begin, end, is_tail});
        }
    }
    for (const int32_t page : pages)
        require(page >= 0 && page < pool_pages, "page " + std::to_string(page) + " is outside the pool");
    write_slots.assign(new_write_slots.begin(), new_write_slots.end());
    num_pages = pool_pages;
    num_tokens = count;
    share_out(shape);
    list_slots();
}

/// Tokens of a group are at the same position, and their partial results lie side by side: the group is one run. (A step of a
/// branch tree has no others.)
void AttentionPlan::add_group(const AttentionShape& shape, const Group& group) {
    for (int32_t begin = group.begin, end = begin; begin < group.end; begin = end) {
        const auto first = static_cast<size_t>(begin);
        const bool continues = past_[first] % kSplit != 0;
        for (end = begin + 1; end < group.end; ++end) {
            const auto token = static_cast<size_t>(end);
            if (past_[token] != past_[first]) break;
            if (continues && last_slot_[token] != last_slot_[first] + end - begin) break;
        }
        add_run(shape, group, begin, end);
        for (int32_t token = begin; token < end; ++token) past_[static_cast<size_t>(token)] += group.num_kv;
    }
}

void AttentionPlan::add_run(const AttentionShape& shape, const Group& group, int32_t begin, int32_t end) {
    const int32_t past = past_[static_cast<size_t>(begin)];
    const int32_t num_new = group.end - group.begin;
    // A new token may be written by the one item that reads its block.
    const int32_t last_from = std::max(0, (past + group.num_kv - 1) / kSplit * kSplit - past);
    const bool writes = group.is_tail && num_new == 1 &&
                        (last_from == 0 || (group.num_kv - 1) / kBlock != (last_from - 1) / kBlock);
    if (group.is_tail && !writes)
        for (int32_t token = begin; token < end; ++token) early_writes.push_back(token);
    const int32_t at_once = std::max(1, kUnitRows / (shape.num_heads / shape.num_kv_heads));
    for (int32_t from = 0, to = 0; from < group.num_kv; from = to) {
        to = std::min(group.num_kv, ((past + from) / kSplit + 1) * kSplit - past);
        const int32_t base = from / kBlock * kBlock;
        const bool continues = from == 0 && past % kSplit != 0;
        for (int32_t first = begin; first < end; first += at_once) {
            const int32_t count = std::min(at_once, end - first);
            // A row's i-th of n new tokens sees all but the last n - 1 - i of its tail.
            const int32_t limit = group.is_tail ? group.num_kv - num_new + 1 + (first - group.begin) - base : to - base;
            if (limit + count - 1 <= from - base) continue;
            const int32_t slot = continues ? last_slot_[static_cast<size_t>(first)] : num_slots;
            int32_t wave = 0;
            for (int32_t i = 0; i < count; ++i) {
                const auto token = static_cast<size_t>(first + i);
                if (continues) {
                    AttentionItem& before = items[static_cast<size_t>(last_item_[token])];
                    before.goes_on = true;
                    wave = std::max(wave, before.wave + 1);
                }
                last_item_[token] = static_cast<int32_t>(items.size());
                last_slot_[token] = slot + i;
            }
            items.push_back({.first_page = group.first_page,
                             .num_blocks = (group.num_kv + kBlock - 1) / kBlock,
                             .first_block = from / kBlock,
                             .begin = from - base,
                             .end = to - base,
                             .first_limit = limit,
                             .phase = past % kBlock,
                             .first_token = first,
                             .num_queries = count,
                             .slot = slot,
                             .wave = wave,
                             .writes = writes && to == group.num_kv,
                             .continues = continues,
                             .goes_on = false});
            if (!continues) num_slots += count;
        }
    }
}

/// Cut the items into units and tasks. None of it depends on the number of threads.
void AttentionPlan::share_out(const AttentionShape& shape) {
    units.clear();
    task_indptr.assign(1, 0);
    wave_indptr.assign(1, 0);
    const auto num_items = static_cast<int32_t>(items.size());
    const int32_t num_heads = shape.num_kv_heads;
    int32_t num_waves = 1;
    for (const AttentionItem& item : items) num_waves = std::max(num_waves, item.wave + 1);
    for (int32_t wave = 0; wave < num_waves; ++wave) {
        int64_t cost = 0;
        for (int32_t first = 0, next = 0; first < num_items; first = next) {
            // The splits of one long segment: head by head, so that one split's table goes on where the last one's ended.
            const AttentionItem& item = items[static_cast<size_t>(first)];
            next = first + 1;
            if (item.wave != wave) continue;
            while (next < num_items && items[static_cast<size_t>(next)].first_page == item.first_page &&
                   items[static_cast<size_t>(next)].wave == wave)
                ++next;
            for (int32_t head = 0; head < num_heads; ++head) {
                for (int32_t i = first; i < next; ++i) {
                    const AttentionItem& each = items[static_cast<size_t>(i)];
                    units.push_back({i, head});
                    cost += int64_t{each.end - each.begin} * shape.head_dim *
                            (8 + 2 * each.num_queries * shape.num_heads / num_heads);
                    if (cost < kTaskCost) continue;
                    task_indptr.push_back(static_cast<int32_t>(units.size()));
                    cost = 0;
                }
            }
        }
        if (task_indptr.back() != static_cast<int32_t>(units.size())) task_indptr.push_back(static_cast<int32_t>(units.size()));
        wave_indptr.push_back(static_cast<int32_t>(task_indptr.size()) - 1);
    }
}

/// Number the partial results of each token.
void AttentionPlan::list_slots() {
    slot_indptr.assign(static_cast<size_t>(num_tokens) + 1, 0);
    for (const AttentionItem& item : items) {
        if (item.continues) continue;
        for (int32_t i = 0; i < item.num_queries; ++i) ++slot_indptr[static_cast<size_t>(item.first_token + i) + 1];
    }
    for (size_t t = 1; t < slot_indptr.size(); ++t) slot_indptr[t] += slot_indptr[t - 1];
    slots.resize(static_cast<size_t>(num_slots));
    for (const AttentionItem& item : items) {
        if (item.continues) continue;
        for (int32_t i = 0; i < item.num_queries; ++i)
            slots[static_cast<size_t>(slot_indptr[static_cast<size_t>(item.first_token + i)]++)] = item.slot + i;
    }
    for (size_t t = slot_indptr.size() - 1; t > 0; --t) slot_indptr[t] = slot_indptr[t - 1];
    slot_indptr[0] = 0;
}

}  // namespace branchline::kernels
