// The rows of a step: who decodes, who prefills, and the step's arrays.
#pragma once

#include <cstdint>
#include <cstring>

#include "branchline/buffer.hpp"
#include "branchline/level_planner.hpp"
#include "branchline/prefix_index.hpp"
#include "branchline/tree.hpp"

namespace branchline {

/// Decode rows stay from step to step; prefill rows are for one step. While rows keep their places, their lengths live here
/// (see `sync`) and a step writes O(rows) numbers. What Python can see is a copy: nothing that it writes there is read back,
/// but for `next_tokens`.
///
/// With a `table_width` each row's pages are kept in a padded table instead of levels; rows must be flat then (max_levels 1).
class Batch {
  public:
    Batch(Tree& tree, PrefixIndex& index, int32_t max_batch, int32_t max_step_tokens, int32_t level_cost_pages,
          int32_t table_width);

    void join(int32_t branch, int64_t slot, int32_t next_token);
    /// Takes a branch out, or its queued prefill row. Throws BatchError if it has neither.
    void leave(int32_t branch);
    /// Takes a branch out if it is in.
    void drop(int32_t branch);
    void prefill(int32_t branch, int64_t slot, const int32_t* tokens, int64_t count);

    /// Brings the branch's length in the tree up to date.
    void sync(int32_t branch) const {
        Branch& b = tree_.branch(branch);
        if (b.row != kNone) b.length = row_length_[static_cast<std::size_t>(b.row)];
    }
    /// Same, for all branches.
    void sync_all() const;
    /// To be called before a branch's tail changes: its row must be laid out anew.
    void detach(int32_t branch);

    int32_t plan();
    void commit();
    void rollback();
    bool planned() const { return planned_; }

    int32_t max_batch() const { return max_batch_; }
    int32_t max_step_tokens() const { return max_step_tokens_; }
    int32_t num_tokens() const { return num_tokens_; }
    int32_t num_rows() const { return num_rows_; }
    int32_t num_levels() const { return table_width_ > 0 ? 0 : levels_.num_levels(); }
    int32_t table_width() const { return table_width_; }
    int64_t num_steps() const { return num_steps_; }
    int64_t num_step_tokens() const { return num_step_tokens_; }
    int64_t num_all_copies() const { return num_all_copies_; }
    int64_t num_evicted_pages() const { return num_evicted_pages_; }

    int32_t num_copies() const { return num_copies_; }
    const LevelArrays& level(int32_t i) const { return levels_.level(i); }

    int32_t* next_tokens() { return next_tokens_.data(); }
    int32_t* token_ids() { return token_ids_.data(); }
    int32_t* positions() { return positions_.data(); }
    int32_t* write_slots() { return write_slots_.data(); }
    int32_t* row_indptr() { return row_indptr_out_.data(); }
    int32_t* row_slots() { return row_slots_out_.data(); }
    int32_t* copy_src() { return copy_src_.data(); }
    int32_t* copy_dst() { return copy_dst_.data(); }
    int32_t* copy_tokens() { return copy_tokens_.data(); }

    int32_t* table() { return table_.data(); }
    int32_t* table_lengths() { return table_lengths_.data(); }

    /// Evicts from the prefix index if fewer than `need` pages are free. Throws OutOfPagesError, then nothing was evicted.
    void require_pages(int64_t need, const char* who);

    /// Throws CoreError that names the first broken invariant.
    void check() const;

  private:
    struct Member {
        int32_t branch;
        int32_t slot;
    };
    struct Queued {
        int32_t branch;
        int32_t slot;
        int32_t first;  // in queued_tokens_
        int32_t count;
    };

    static std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }
    static void copy_ints(int32_t* out, const int32_t* in, int32_t count) { std::memcpy(out, in, sizeof(int32_t) * at(count)); }
    int32_t take_slot(int64_t slot);
    void require_width(int64_t length) const;
    void advance();
    void cross(int32_t count);
    void lay_out();
    void lay_out_table();
    void forget_layout();
    void clear_queue();

    Tree& tree_;
    PrefixIndex& index_;
    LevelPlanner levels_;
    int32_t max_batch_;
    int32_t max_step_tokens_;
    int32_t table_width_;
    bool planned_ = false;
    bool steady_ = false;  // the rows of the last plan are the decode rows, unchanged
    int32_t num_members_ = 0;
    int32_t num_queued_ = 0;
    int32_t num_queued_tokens_ = 0;
    int32_t num_tokens_ = 0;
    int32_t num_rows_ = 0;
    int32_t num_copies_ = 0;
    int32_t longest_ = 0;  // length of the table's longest row
    Gauge<int64_t> num_steps_;
    Gauge<int64_t> num_step_tokens_;
    Gauge<int64_t> num_all_copies_;
    Gauge<int64_t> num_evicted_pages_;

    Buffer<Member> members_;
    Buffer<Queued> queue_;
    Buffer<int32_t> queued_tokens_;
    Buffer<uint8_t> slot_taken_;

    Buffer<int32_t> order_;
    Buffer<int32_t> entry_branch_;
    // The layout, by row.
    Buffer<int32_t> row_branch_;  // kNone: detached
    Buffer<int32_t> row_slot_;
    Buffer<int32_t> row_indptr_;
    Buffer<int32_t> row_length_;
    Buffer<int32_t> row_write_;  // write slot of its last token
    Buffer<int32_t> row_fill_;   // tokens on its last page
    Buffer<int32_t> row_kv_;     // [rows + 1] kv_indptr of the last level
    Buffer<int32_t> row_pages_;  // pages in the table
    Buffer<int32_t> crossing_;

    Buffer<int32_t> next_tokens_;
    Buffer<int32_t> token_ids_;
    Buffer<int32_t> positions_;
    Buffer<int32_t> write_slots_;
    Buffer<int32_t> row_indptr_out_;
    Buffer<int32_t> row_slots_out_;
    Buffer<int32_t> copy_src_;
    Buffer<int32_t> copy_dst_;
    Buffer<int32_t> copy_tokens_;
    Buffer<int32_t> table_;  // [max_batch, table_width], by row
    Buffer<int32_t> table_lengths_;
};

}  // namespace branchline
