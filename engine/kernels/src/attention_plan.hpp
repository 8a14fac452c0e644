// A step's tree attention cut into work: which runs of K/V meet which query tokens, and in what order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "branchline/kernels/attention.hpp"

namespace branchline::kernels {

constexpr int kBlock = 16;  // tokens of K or V that lie together

/// A run of a segment's K/V, within one split, and the query tokens that see it.
struct AttentionItem {
    int64_t first_page;  // of its segment, in the plan's pages
    int32_t num_blocks;  // of its segment
    int32_t first_block;  // of the run, in its segment
    int32_t begin;  // of the run, end and limit: in tokens from the beginning of its first block
    int32_t end;
    int32_t first_limit;
    int32_t phase;  // position, modulo 16, of its blocks' first tokens
    int32_t first_token;
    int32_t num_queries;
    int32_t slot;  // of its first token's partial result
    int32_t wave;
    bool writes;  // it ends with the one new token of a decode row, and writes it first
    bool continues;  // what another item began
    bool goes_on;  // in another item
};

struct PlannedUnit {
    int32_t item;
    int32_t kv_head;
};

/// Every branch is cut into splits of 512 tokens, counted from its first position: the same ones however its K/V are cut into
/// segments. A split's partial result that one segment leaves unfinished is continued by the next one, in the next wave.
class AttentionPlan {
  public:
    int64_t num_tokens = 0;
    int64_t num_pages = 0;
    int32_t num_slots = 0;
    std::vector<int32_t> write_slots;
    std::vector<int32_t> early_writes;  // tokens that must be written before any unit starts
    std::vector<int32_t> pages;
    std::vector<AttentionItem> items;
    std::vector<PlannedUnit> units;
    std::vector<int32_t> task_indptr;  // task i does units [task_indptr[i], task_indptr[i + 1])
    std::vector<int32_t> wave_indptr;  // tasks [wave_indptr[w], wave_indptr[w + 1]) may run once those before them have
    std::vector<int32_t> slot_indptr;  // token t's partial results are at slots[slot_indptr[t] : slot_indptr[t + 1]]
    std::vector<int32_t> slots;        // of each token in the order of positions

    /// Takes a step's arrays. Allocates only while steps grow. Throws std::invalid_argument as TreeAttention::plan does; then
    /// the plan is of no token.
    void make(const AttentionShape& shape, std::span<const int32_t> new_write_slots, std::span<const int32_t> row_indptr,
              std::span<const AttentionLevel> levels, int64_t pool_pages);

  private:
    /// A group of a level: tokens [begin, end) of the step and the segment that they see.
    struct Group {
        int64_t first_page;
        int32_t num_kv;
        int32_t begin;
        int32_t end;
        bool is_tail;
    };

    void add_group(const AttentionShape& shape, const Group& group);
    void add_run(const AttentionShape& shape, const Group& group, int32_t begin, int32_t end);
    void share_out(const AttentionShape& shape);
    void list_slots();

    // While it is made, of each token: K/V before the level at hand, and the last partial result.
    std::vector<int32_t> past_;
    std::vector<int32_t> last_item_;
    std::vector<int32_t> last_slot_;
};

}  // namespace branchline::kernels
