// What Python sees: branches by handle, the batch, and the rule that nothing changes between plan and commit.
#pragma once

#include <cstdint>
#include <vector>

#include "branchline/batch.hpp"
#include "branchline/tree.hpp"

namespace branchline {

struct TreeSizes {
    int64_t num_pages;
    int64_t page_tokens = 16;
    int64_t max_branches = 65536;
    int64_t max_batch = 512;
    int64_t max_step_tokens = 1024;
    int64_t max_levels = 8;
    int64_t level_cost_pages = 32;
};

struct BranchSizes {
    int32_t num_tokens;
    int32_t shared_tokens;
    int32_t shared_pages;
    int32_t private_pages;
    int32_t depth;
};

class BranchTree {
  public:
    /// Throws std::invalid_argument, std::bad_alloc.
    explicit BranchTree(const TreeSizes& sizes);

    Handle root();
    Handle fork(Handle branch);
    /// Writes `count` handles. Throws std::invalid_argument on a negative count.
    void fork_many(Handle branch, int64_t count, Handle* out);
    /// Throws as `fork_many` would, before its result has to be allocated.
    void require_fork(Handle branch, int64_t count) const;
    void release(Handle branch);
    void release_many(const Handle* branches, int64_t count);
    void truncate(Handle branch, int64_t num_tokens);

    int32_t length(Handle branch) { return branch_of(branch).length; }
    int32_t shared_length(Handle branch) { return branch_of(branch).start; }
    std::vector<int32_t> tokens(Handle branch);
    std::vector<int32_t> pages(Handle branch);
    BranchSizes describe(Handle branch);
    int32_t pages_needed(Handle branch, int64_t num_tokens);

    void join(Handle branch, int64_t slot, int32_t next_token);
    void leave(Handle branch);
    void prefill(Handle branch, int64_t slot, const int32_t* tokens, int64_t count);
    int32_t plan();
    void commit();
    void rollback();

    /// Throws BatchError when out of range.
    const LevelArrays& level(int64_t index) const;
    void check();

    Batch& batch() { return batch_; }
    const Tree& tree() const { return tree_; }

  private:
    void require_idle() const;
    int32_t open(Handle branch);
    const Branch& branch_of(Handle branch) { return tree_.branch(open(branch)); }

    Tree tree_;
    Batch batch_;
};

}  // namespace branchline
