#include "branchline/branch_tree.hpp"

#include <algorithm>
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
    at_least("table_width", sizes.table_width, 0);
    if (sizes.page_tokens > UINT16_MAX) {
        throw std::invalid_argument("page_tokens = " + std::to_string(sizes.page_tokens) + ": expected at most 65535");
    }
    if (sizes.table_width > 0 && sizes.max_levels > 1) {
        throw std::invalid_argument("table_width = " + std::to_string(sizes.table_width) + " with max_levels = " +
                                    std::to_string(sizes.max_levels) + ": a table can hold half a page only at its end, expected max_levels = 1");
    }
    if (sizes.max_levels > 1024) {
        throw std::invalid_argument("max_levels = " + std::to_string(sizes.max_levels) + ": expected at most 1024");
    }
    return sizes;
}

int32_t checked_tenant(int64_t tenant) {
    if (tenant < 0 || tenant >= Tree::kTenants) {
        throw std::invalid_argument("tenant = " + std::to_string(tenant) + ": expected from 0 to " + std::to_string(Tree::kTenants - 1));
    }
    return static_cast<int32_t>(tenant);
}

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

}  // namespace

BranchTree::BranchTree(const TreeSizes& sizes)
    : tree_(narrow(checked(sizes).num_pages), narrow(sizes.page_tokens), narrow(sizes.max_branches), narrow(sizes.max_levels),
            sizes.zero_used),
      index_(tree_),
      leases_(tree_, narrow(sizes.max_branches)),
      batch_(tree_, index_, narrow(sizes.max_batch), narrow(sizes.max_step_tokens), narrow(sizes.level_cost_pages),
             narrow(sizes.table_width)) {}

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

Handle BranchTree::root(int64_t tenant) {
    require_idle();
    return tree_.handle_of(tree_.root(checked_tenant(tenant)));
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
    tree_.release_many(branches, count, [this](int32_t i) { batch_.drop(i); });
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

void BranchTree::require_lend(int64_t count, int64_t num_pages, int64_t tenant) {
    require_idle();
    checked_tenant(tenant);
    if (num_pages < 0 || num_pages > INT_MAX || count < 0 || count > INT_MAX) {
        throw std::invalid_argument("count = " + std::to_string(count) + ", num_pages = " + std::to_string(num_pages) +
                                    ": expected from 0 to " + std::to_string(INT_MAX));
    }
    if (num_pages * count > tree_.pool().num_free()) batch_.require_pages(num_pages * count, "the loan");
}

Handle BranchTree::lend(int64_t num_pages, int64_t tenant) {
    Handle lease = 0;
    lend_many(1, num_pages, tenant, &lease);
    return lease;
}

void BranchTree::lend_many(int64_t count, int64_t num_pages, int64_t tenant, Handle* out) {
    require_lend(count, num_pages, tenant);
    leases_.lend(narrow(num_pages), narrow(tenant), narrow(count), out);
}

void BranchTree::give_back(const Handle* leases, int64_t count) {
    require_idle();
    leases_.give_back(leases, count);
}

std::vector<int32_t> BranchTree::leased_pages(Handle lease) const {
    const PageList& pages = leases_.pages(lease);
    std::vector<int32_t> out(static_cast<std::size_t>(pages.count));
    tree_.pool().copy_ids(pages, pages.count, out.data());
    return out;
}

int32_t BranchTree::tenant_pages(int64_t tenant) const { return tree_.tenant_pages(checked_tenant(tenant)); }

int32_t BranchTree::tenant_cached_pages(int64_t tenant) const { return tree_.tenant_idle_pages(checked_tenant(tenant)); }

std::vector<int32_t> BranchTree::take_used() {
    require_idle();
    std::vector<int32_t> out(static_cast<std::size_t>(tree_.pool().num_used()));
    tree_.pool().take_used(out.data());
    return out;
}

Handle BranchTree::match(const int32_t* tokens, int64_t count, int64_t tenant) {
    require_idle();
    const int32_t of = checked_tenant(tenant);
    tree_.require_branches(1);
    const int32_t segment = index_.match(tokens, narrow(std::min<int64_t>(count, INT_MAX)), of);
    const int32_t branch = tree_.open_on(segment, of);
    matched_tokens_ += tree_.branch(branch).length;
    return tree_.handle_of(branch);
}

Found BranchTree::peek(const int32_t* tokens, int64_t count, int64_t tenant) const {
    return index_.peek(tokens, narrow(std::min<int64_t>(count, INT_MAX)), checked_tenant(tenant));
}

/// The live branch, which must not be in the batch.
int32_t BranchTree::open_outside(Handle branch) {
    const int32_t i = open(branch);
    if (tree_.branch(i).member != kNone || tree_.branch(i).queued != kNone) {
        throw BatchError("the branch is in the batch: leave() first");
    }
    batch_.detach(i);
    return i;
}

Graft BranchTree::graft(Handle handle, const int32_t* tokens, int64_t count) {
    const int32_t i = open_outside(handle);
    const Branch& branch = tree_.branch(i);
    const bool full = branch.parent == kNone || tree_.segment(branch.parent).boundary == Boundary::aligned;
    if (branch.length > branch.start || !full || tree_.pool().num_free() == 0) return Graft{0, 0, 0};
    const HalfPage half = index_.half_page(branch.parent, branch.tenant, tokens, narrow(std::min<int64_t>(count, INT_MAX)));
    if (half.tokens == 0) return Graft{0, 0, 0};
    return Graft{half.page, tree_.adopt_tokens(i, half.page, half.tokens), half.tokens};
}

std::vector<int32_t> BranchTree::extend(Handle handle, const int32_t* tokens, int64_t count) {
    const int32_t i = open_outside(handle);
    const int64_t most = INT_MAX - static_cast<int64_t>(tree_.branch(i).length);
    if (count > most) {
        throw std::invalid_argument(std::to_string(count) + " tokens: expected at most " + std::to_string(most));
    }
    batch_.require_pages(tree_.extension_pages(i, count), "the extension");
    std::vector<int32_t> slots(static_cast<std::size_t>(count));
    PageCopy copy{};
    if (count > 0) tree_.append(i, tokens, narrow(count), slots.data(), copy);
    const PageList& tail = tree_.tail(i);
    std::vector<int32_t> out(static_cast<std::size_t>(tail.count));
    tree_.pool().copy_ids(tail, tail.count, out.data());
    return out;
}

int32_t BranchTree::insert(Handle branch) { return index_.insert(open(branch)); }

int32_t BranchTree::evict(int64_t num_pages) {
    require_idle();
    return index_.evict(narrow(std::clamp<int64_t>(num_pages, 0, INT_MAX)));
}

Counters BranchTree::counters() const {
    const PagePool& pool = tree_.pool();
    return Counters{pool.num_pages(),      pool.num_free(),           pool.num_used(),         tree_.num_branches(),
                    tree_.num_segments(),  tree_.num_forks(),         batch_.num_steps(),      batch_.num_step_tokens(),
                    batch_.num_all_copies(), batch_.num_evicted_pages(), matched_tokens_,
                    tree_.idle_pages()};
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
    std::vector<std::pair<const PageList*, int32_t>> lent;
    leases_.for_each([&](const PageList& pages, int32_t tenant) { lent.emplace_back(&pages, tenant); });
    tree_.check(lent);
    index_.check();
    batch_.check();
}

}  // namespace branchline
