#include "branchline/branch_tree.hpp"

#include <climits>
#include <stdexcept>
#include <string>

namespace branchline {

namespace {

const TreeSizes& checked(const TreeSizes& sizes) {
    const auto at_least = [](const char* name, int64_t value, int64_t least) {
        if (value < least || value > INT_MAX) {
            throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + ": expected from " +
                                        std::to_string(least) + " to " + std::to_string(INT_MAX));
        }
    };
    at_least("num_pages", sizes.num_pages, 1);
    at_least("page_tokens", sizes.page_tokens, 1);
    at_least("max_branches", sizes.max_branches, 1);
    at_least("max_batch", sizes.max_batch, 1);
    at_least("max_step_tokens", sizes.max_step_tokens, 1);
    at_least("max_levels", sizes.max_levels, 1);
    at_least("level_cost_pages", sizes.level_cost_pages, 0);
    if (sizes.num_pages * sizes.page_tokens > INT_MAX) {
        throw std::invalid_argument("num_pages * page_tokens = " + std::to_string(sizes.num_pages * sizes.page_tokens) +
                                    ": write slots are 32-bit, expected at most " + std::to_string(INT_MAX));
    }
    if (sizes.max_levels > 1024) {
        throw std::invalid_argument("max_levels = " + std::to_string(sizes.max_levels) + ": expected at most 1024");
    }
    return sizes;
}

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

}  // namespace

BranchTree::BranchTree(const TreeSizes& sizes)
    : tree_(narrow(checked(sizes).num_pages), narrow(sizes.page_tokens), narrow(sizes.max_branches), narrow(sizes.max_levels)),
      batch_(tree_, narrow(sizes.max_batch), narrow(sizes.max_step_tokens), narrow(sizes.level_cost_pages)) {}

void BranchTree::require_idle() const {
    if (batch_.planned()) [[unlikely]] throw BatchError("a plan is open: commit() or rollback() it first");
}

/// The live branch, with its length up to date.
int32_t BranchTree::open(Handle branch) {
    require_idle();
    const int32_t i = tree_.resolve(branch);
    batch_.sync(i);
    return i;
}

Handle BranchTree::root() {
    require_idle();
    return tree_.handle_of(tree_.root());
}

Handle BranchTree::fork(Handle branch) {
    const int32_t i = open(branch);
    Handle child = 0;
    if (tree_.branch(i).length > tree_.branch(i).start) batch_.detach(i);
    tree_.fork(i, 1, [&](int32_t, Handle handle) { child = handle; });
    return child;
}

void BranchTree::require_fork(Handle branch, int64_t count) const {
    require_idle();
    tree_.resolve(branch);
    if (count < 0 || count > INT_MAX) {
        throw std::invalid_argument("count = " + std::to_string(count) + ": expected from 0 to " + std::to_string(INT_MAX));
    }
    tree_.require_branches(narrow(count));
}

void BranchTree::fork_many(Handle branch, int64_t count, Handle* out) {
    require_fork(branch, count);
    const int32_t i = open(branch);
    if (count > 0 && tree_.branch(i).length > tree_.branch(i).start) batch_.detach(i);
    tree_.fork(i, narrow(count), [&](int32_t k, Handle handle) { out[k] = handle; });
}

void BranchTree::release(Handle branch) {
    const int32_t i = open(branch);
    batch_.drop(i);
    tree_.release(i);
}

void BranchTree::release_many(const Handle* branches, int64_t count) {
    require_idle();
    // A branch that was seen is marked by an even generation, so that its second appearance doesn't resolve.
    int64_t seen = 0;
    try {
        for (; seen < count; ++seen) tree_.branch(tree_.resolve(branches[seen])).generation ^= 1u;
    } catch (const ReleasedHandleError&) {
        const Handle bad = branches[seen];
        bool twice = false;
        while (--seen >= 0) {
            tree_.branch(static_cast<int32_t>(static_cast<uint32_t>(branches[seen]))).generation ^= 1u;
            twice = twice || branches[seen] == bad;
        }
        if (twice) throw ReleasedHandleError("branch handle " + std::to_string(bad) + " is given twice; none was released");
        throw;
    }
    for (int64_t k = 0; k < count; ++k) {
        const auto i = static_cast<int32_t>(static_cast<uint32_t>(branches[k]));
        tree_.branch(i).generation ^= 1u;
        batch_.drop(i);
        tree_.release(i);
    }
}

void BranchTree::truncate(Handle branch, int64_t num_tokens) {
    const int32_t i = open(branch);
    if (num_tokens < 0 || num_tokens > INT_MAX) {
        throw std::invalid_argument("num_tokens = " + std::to_string(num_tokens) + ": expected from 0 to the branch's length");
    }
    if (num_tokens < tree_.branch(i).length) batch_.detach(i);
    tree_.truncate(i, narrow(num_tokens));
}

std::vector<int32_t> BranchTree::tokens(Handle branch) {
    const int32_t i = open(branch);
    std::vector<int32_t> out(static_cast<std::size_t>(tree_.branch(i).length));
    tree_.copy_tokens(i, out.data());
    return out;
}

std::vector<int32_t> BranchTree::pages(Handle branch) {
    const int32_t i = open(branch);
    std::vector<int32_t> out(static_cast<std::size_t>(tree_.count_pages(i)));
    tree_.copy_pages(i, out.data());
    return out;
}

BranchSizes BranchTree::describe(Handle branch) {
    const int32_t i = open(branch);
    const Branch& b = tree_.branch(i);
    const int32_t own = tree_.tail(i).count;
    return BranchSizes{b.length, b.start, tree_.count_pages(i) - own, own, tree_.depth(i)};
}

int32_t BranchTree::pages_needed(Handle branch, int64_t num_tokens) {
    const int32_t i = open(branch);
    const int64_t most = INT_MAX - static_cast<int64_t>(tree_.branch(i).length);
    if (num_tokens < 0 || num_tokens > most) {
        throw std::invalid_argument("num_tokens = " + std::to_string(num_tokens) + ": expected from 0 to " + std::to_string(most));
    }
    return tree_.pages_needed(i, narrow(num_tokens));
}

void BranchTree::join(Handle branch, int64_t slot, int32_t next_token) { batch_.join(open(branch), slot, next_token); }

void BranchTree::leave(Handle branch) { batch_.leave(open(branch)); }

void BranchTree::prefill(Handle branch, int64_t slot, const int32_t* tokens, int64_t count) {
    batch_.prefill(open(branch), slot, tokens, count);
}

int32_t BranchTree::plan() {
    require_idle();
    return batch_.plan();
}

void BranchTree::commit() {
    if (!batch_.planned()) throw BatchError("no plan is open: plan() first");
    batch_.commit();
}

void BranchTree::rollback() {
    if (!batch_.planned()) throw BatchError("no plan is open: plan() first");
    batch_.rollback();
}

const LevelArrays& BranchTree::level(int64_t index) const {
    if (index < 0 || index >= batch_.num_levels()) {
        throw BatchError("level " + std::to_string(index) + " is out of range: the last plan has " +
                         std::to_string(batch_.num_levels()));
    }
    return batch_.level(narrow(index));
}

void BranchTree::check() {
    batch_.sync_all();
    tree_.check();
    batch_.check();
}

}  // namespace branchline
