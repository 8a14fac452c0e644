// What Python sees: branches by handle, the batch, and the rule that nothing changes between plan and commit.
#pragma once

#include <cstdint>
#include <vector>

#include "branchline/batch.hpp"
#include "branchline/lease_table.hpp"
#include "branchline/prefix_index.hpp"
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
    int64_t table_width = 0;
    bool zero_used = false;
};

/// A snapshot of what happened and what there is; see `counters` in _core.pyi.
struct Counters {
    int64_t pages_total;
    int64_t pages_free;
    int64_t pages_used;
    int64_t branches;
    int64_t segments;
    int64_t forks;
    int64_t steps;
    int64_t step_tokens;
    int64_t copies;
    int64_t evicted_pages;
    int64_t matched_tokens;
    int64_t pages_cached;
};

/// What `graft` did: the first `tokens` tokens of page `src` must be copied to page `dst`. 0 tokens: nothing was done.
struct Graft {
    int32_t src;
    int32_t dst;
    int32_t tokens;
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

    Handle root(int64_t tenant);
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

    /// Lends pages out. Throws OutOfPagesError, OutOfBranchesError, std::invalid_argument.
    Handle lend(int64_t num_pages, int64_t tenant);
    void require_lend(int64_t count, int64_t num_pages, int64_t tenant);
    void lend_many(int64_t count, int64_t num_pages, int64_t tenant, Handle* out);
    void give_back(const Handle* leases, int64_t count);
    std::vector<int32_t> leased_pages(Handle lease) const;
    int32_t tenant_pages(int64_t tenant) const;
    int32_t tenant_cached_pages(int64_t tenant) const;
    /// Pages given back since the last call; they are free afterwards.
    std::vector<int32_t> take_used();

    /// A new branch on the longest indexed prefix. Throws OutOfBranchesError.
    Handle match(const int32_t* tokens, int64_t count, int64_t tenant);
    /// What `match` would find.
    Found peek(const int32_t* tokens, int64_t count, int64_t tenant) const;
    /// Throws BatchError if the branch is in the batch.
    Graft graft(Handle branch, const int32_t* tokens, int64_t count);
    /// Appends outside a step. Returns the pages of the tail. Throws OutOfPagesError, BatchError.
    std::vector<int32_t> extend(Handle branch, const int32_t* tokens, int64_t count);
    std::pair<int32_t, int32_t> private_part(Handle branch) { return tree_.private_part(open(branch)); }
    int32_t insert(Handle branch);
    int32_t evict(int64_t num_pages);

    /// May be called from any thread.
    Counters counters() const;

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
    int32_t open_outside(Handle branch);
    const Branch& branch_of(Handle branch) { return tree_.branch(open(branch)); }

    Tree tree_;
    PrefixIndex index_;
    LeaseTable leases_;
    Batch batch_;
    Gauge<int64_t> matched_tokens_;
};

}  // namespace branchline
