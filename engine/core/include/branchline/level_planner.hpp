// From the rows of a step to the levels of cascade attention.
#pragma once

#include <cstdint>

#include "branchline/buffer.hpp"
#include "branchline/tree.hpp"

namespace branchline {

/// One level as FlashInfer takes it; see `Level` in engine/branchline/engine/step.py. Python can write to the arrays, so
/// that nothing is read from them after the plan that filled them.
struct LevelArrays {
    int32_t num_groups;
    int32_t num_indices;     // kv_indptr[groups]
    int32_t* qo_indptr;      // [groups + 1]
    int32_t* kv_indptr;      // [groups + 1]
    int32_t* last_page_len;  // [groups]
    int32_t* kv_indices;     // [kv_indptr[groups]]
};

/// Orders rows so that those below one segment are neighbours, and decides which segments are read together.
///
/// A chain of segments between two points where rows part is one *run*. A run that ends in half a page is always read by
/// itself. Any other that several rows share could be: all runs with as many shared runs above them would make one level, which
/// reads `rows - 1` times fewer pages of each. The `max_levels` such levels that save most are kept, if they save at least
/// `level_cost_pages`; the pages of the others go on into the tables below them. So a step has at most 2 * max_levels levels.
class LevelPlanner {
  public:
    LevelPlanner(const Tree& tree, int32_t max_batch, int32_t level_cost_pages);

    /// Sets the rows' order from their branches' segments: `order[r]` is the index in `branches` of row r.
    void order_rows(const int32_t* branches, int32_t count, int32_t* order);
    /// Builds the levels for rows in that order, after their tokens were appended. `branches[r]` is row r's.
    void build(const int32_t* branches, int32_t count, const int32_t* row_indptr);

    int32_t num_levels() const { return num_levels_; }
    const LevelArrays& level(int32_t i) const { return levels_[static_cast<std::size_t>(i)]; }
    /// The last level: one group a row.
    LevelArrays& own() { return levels_[static_cast<std::size_t>(num_levels_ - 1)]; }

  private:
    static constexpr int32_t kChoices = 64;  // runs below so many shared ones are never read by themselves

    /// What is known of a segment that the rows pass through; valid when `epoch` is the current one.
    struct Visit {
        uint32_t epoch;
        int32_t first_child;  // a segment, ~row entry, or kEnd
        int32_t next;         // its next sibling
        int32_t first_row;
        int32_t end_row;
        int32_t pending;  // pages from below the last kept run down to this one's end
        int32_t depth;    // kept runs above
        int32_t soft;     // of those, the ones that were a choice
        int32_t kept;     // whether a level's group ends here: kNo, kHard or kSoft
        int32_t choice;   // of a shared run: shared runs above it
    };

    static std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }
    void look_at(int32_t segment, bool choosing);
    void choose();
    void add_group(int32_t level, int32_t segment);
    void fill_up(int32_t segment, int32_t pages, int32_t* end) const;
    void fill_first(int32_t segment, int32_t pages);

    const Tree& tree_;
    int32_t level_cost_pages_;
    int32_t max_soft_;
    int64_t saved_pages_[kChoices] = {};  // by shared runs above: page reads that such a level saves
    bool chosen_[kChoices] = {};
    uint32_t epoch_ = 0;
    int32_t num_visited_ = 0;
    int32_t num_levels_ = 1;
    int32_t num_choices_ = 0;
    const int32_t* row_indptr_ = nullptr;
    // What the arena begins with: mostly the prefix that all share, which needn't be written again.
    int32_t first_segment_ = kNone;
    int32_t first_pages_ = 0;
    uint32_t first_version_ = 0;
    std::size_t stride_;
    Buffer<Visit> visits_;      // by segment
    Buffer<int32_t> preorder_;  // segments
    Buffer<int32_t> row_next_;  // sibling of a row entry
    Buffer<LevelArrays> levels_;
    Buffer<int32_t> covered_;        // by level: rows that have a group
    Buffer<int32_t> group_segment_;  // [levels, max_batch]
    Buffer<int32_t> qo_indptr_;
    Buffer<int32_t> kv_indptr_;
    Buffer<int32_t> last_page_len_;
    Buffer<int32_t> kv_indices_;  // all levels, one after the other; the last one can grow
};

}  // namespace branchline
