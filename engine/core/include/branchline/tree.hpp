// Branches and the segments that they share.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "branchline/buffer.hpp"
#include "branchline/errors.hpp"
#include "branchline/page_pool.hpp"

namespace branchline {

using Handle = uint64_t;

constexpr int32_t kNone = -1;

/// How what follows a segment goes on after its last page. Decided once, when the segment is made.
enum class Boundary : int16_t {
    aligned,  // the last page is full: the follower starts on a fresh page, tables can be joined
    hard,     // half a page, read as the end of a level of its own: the follower starts on a fresh page
    copied,   // half a page, whose filled part each follower copies into its own first page
};

/// An immutable run of tokens with its pages. `refs` counts the branches and segments that go on from it, and the index. It is
/// idle when nobody holds it but the index and idle segments: then its pages can be given up.
struct Segment {
    int32_t parent;
    int32_t refs;
    int32_t start;  // position of its first own token
    int32_t end;
    uint16_t lead;  // tokens before `start` that its first page holds as a copy
    uint16_t tenant;
    int32_t hard_above;  // hard boundaries in the chain above it
    Boundary boundary;
    int16_t indexed;        // 1 while the prefix index holds it
    int32_t idle_children;  // idle segments that go on from it
    PageList pages;
};

/// A pointer to a segment and a tail that grows. Free branches have no pages, lead 0 and are in no
/// batch; their other numbers mean nothing.
struct Branch {
    int32_t parent;
    int32_t start;   // position of the tail's first own token; the tokens before it are the parent's
    int32_t length;  // tokens in all; out of date while the branch is a row of a batch (see Batch)
    uint16_t lead;   // tokens before `start` that the tail's first page holds as a copy
    uint16_t tenant;
    uint32_t generation;  // odd while the branch lives
    int32_t row;          // row of the batch's layout that holds its length, or kNone
    int32_t member;       // index among the batch's decode rows, or kNone
    int32_t queued;       // index among the queued prefill rows, or kNone
};
static_assert(sizeof(Segment) == 64 && sizeof(Branch) == 32);

/// One page's filled part that must be copied before a step.
struct PageCopy {
    int32_t src;
    int32_t dst;
    int32_t tokens;
};

/// Owns all branches, segments and pages. Lengths of branches must be up to date when a member is called.
class Tree {
  public:
    static constexpr int32_t kTenants = 1 << 16;

    Tree(int32_t num_pages, int32_t page_tokens, int32_t max_branches, int32_t max_levels, bool keep_used);

    /// Where a table's generations begin (even). Each begins elsewhere, so that another one's handles are refused too.
    static uint32_t draw_generation();

    /// Index of a live branch. Throws ReleasedHandleError.
    int32_t resolve(Handle handle) const;
    Handle handle_of(int32_t branch) const {
        return static_cast<Handle>(branches_[static_cast<std::size_t>(branch)].generation) << 32 | static_cast<uint32_t>(branch);
    }

    /// Throws OutOfBranchesError if there is no room for `count` more.
    void require_branches(int32_t count) const;
    int32_t root(int32_t tenant);
    /// Makes `count` children and calls emit(i, handle). All or none. Throws OutOfBranchesError.
    template <typename Emit>
    void fork(int32_t branch, int32_t count, Emit emit);
    void release(int32_t branch);
    /// Gives up many that are in no batch. Checks all handles first (also for duplicates). `leave(branch)` is called for each
    /// that is in the batch. Throws ReleasedHandleError.
    template <typename Leave>
    void release_many(const Handle* branches, int64_t count, Leave leave);
    /// Throws std::invalid_argument.
    void truncate(int32_t branch, int32_t num_tokens);

    /// New pages that appending would take.
    int32_t pages_needed(int32_t branch, int32_t num_tokens) const;
    /// If the branch has no tail and nobody else holds its segment, makes the segment its tail again: the branch goes on in
    /// the page that it had begun, and chains don't grow while children come and go.
    void thaw(int32_t branch);
    /// Appends, takes the pages (which must be free), writes where each token's K/V goes. Returns whether `copy` was set.
    /// `thaw` must have been called.
    bool append(int32_t branch, const int32_t* tokens, int32_t count, int32_t* write_slots, PageCopy& copy);
    /// Takes the last tokens back, with the pages that held nothing else.
    void unappend(int32_t branch, int32_t count) { shorten(branches_[index(branch)], branch, branches_[index(branch)].length - count); }

    void copy_tokens(int32_t branch, int32_t* out) const;
    /// Pages that the branch reads.
    int32_t count_pages(int32_t branch) const;
    void copy_pages(int32_t branch, int32_t* out) const;
    /// Segments above the branch.
    int32_t depth(int32_t branch) const;

    /// Takes a page for the branch's tail.
    int32_t take_page(int32_t branch) {
        tenant_pages_[branches_[index(branch)].tenant] += 1;
        return pool_.take(tails_[index(branch)]);
    }
    void prefetch_tail(int32_t branch) const {
        __builtin_prefetch(&tails_[index(branch)], 1);
        __builtin_prefetch(&branches_[index(branch)]);
    }
    /// Puts a page that was taken with `PagePool::take_ids` at the end of the branch's tail.
    void attach_page(int32_t branch, int32_t page) {
        tenant_pages_[branches_[index(branch)].tenant] += 1;
        pool_.attach(tails_[index(branch)], page);
    }
    int32_t tenant_pages(int32_t tenant) const { return tenant_pages_[index(tenant)]; }
    void count_pages_of(int32_t tenant, int32_t change) { tenant_pages_[index(tenant)] += change; }

    // For the prefix index.
    /// Freezes the full pages of a tail that begins on a page of its own; the rest stays the tail.
    void freeze_full_pages(int32_t branch);
    /// Cuts a segment without lead after `pages` full pages: a new segment takes those, `segment` keeps the rest and what goes
    /// on from it. Returns the new one.
    int32_t split(int32_t segment, int32_t pages);
    void hold(int32_t segment) { segments_[index(segment)].refs += 1; }
    void drop(int32_t segment);
    void set_indexed(int32_t segment, bool indexed) { segments_[index(segment)].indexed = indexed ? 1 : 0; }
    static bool is_idle(const Segment& segment) { return segment.indexed != 0 && segment.refs - 1 == segment.idle_children; }
    /// Pages of idle segments.
    int32_t idle_pages() const { return idle_pages_; }
    int32_t tenant_idle_pages(int32_t tenant) const { return tenant_idle_pages_[index(tenant)]; }
    /// Gives up an idle segment without children.
    void evict(int32_t segment);
    /// Puts tokens that `source` begins with on a page that the branch takes; the branch must have no tail, and the segment that
    /// it goes on from no half page. There must be a free page. Returns the page.
    int32_t adopt_tokens(int32_t branch, int32_t source, int32_t count);
    /// Pages, and tokens on them, that return (or become idle) if the branch is released.
    std::pair<int32_t, int32_t> private_part(int32_t branch) const;
    /// New pages that `extend` would take.
    int32_t extension_pages(int32_t branch, int64_t count) const;
    /// Makes a branch that goes on from `segment` (which may be kNone).
    int32_t open_on(int32_t segment, int32_t tenant);
    /// Pages of a segment that its followers read.
    int32_t pages_read(const Segment& segment) const {
        return segment.boundary == Boundary::copied ? stored(segment) / pool_.page_tokens() : segment.pages.count;
    }
    /// Tokens on a segment's pages.
    static int32_t stored(const Segment& segment) { return segment.lead + segment.end - segment.start; }

    Branch& branch(int32_t i) { return branches_[index(i)]; }
    const Branch& branch(int32_t i) const { return branches_[index(i)]; }
    PageList& tail(int32_t i) { return tails_[index(i)]; }
    const PageList& tail(int32_t i) const { return tails_[index(i)]; }
    const Segment& segment(int32_t i) const { return segments_[index(i)]; }
    PagePool& pool() { return pool_; }
    const PagePool& pool() const { return pool_; }
    int32_t num_branches() const { return num_branches_; }
    int32_t num_segments() const { return num_segments_; }
    int32_t max_segments() const { return static_cast<int32_t>(segments_.size()); }
    int32_t max_branches() const { return static_cast<int32_t>(branches_.size()); }
    int32_t max_levels() const { return max_levels_; }

    /// Changes whenever a segment's number may come to mean other pages.
    uint32_t segments_version() const { return segments_version_; }
    int64_t num_forks() const { return num_forks_; }

    /// Throws CoreError that names the first broken invariant. `lent`: the page
    /// lists of others, with their tenants.
    void check(const std::vector<std::pair<const PageList*, int32_t>>& lent) const;

  private:
    [[noreturn]] static void refuse(Handle handle);
    static std::size_t index(int32_t i) { return static_cast<std::size_t>(i); }

    int32_t open_branch(int32_t parent, int32_t length, int32_t tenant);
    void give_tail(Branch& branch, int32_t i);
    void freeze(Branch& branch, int32_t i);
    void freeze_tail(Branch& branch, int32_t i);
    void shorten(Branch& branch, int32_t i, int32_t num_tokens);
    void rest(int32_t segment);
    void wake(int32_t segment);
    void count_idle(const Segment& segment, int32_t change) {
        idle_pages_ += change;
        tenant_idle_pages_[segment.tenant] += change;
    }

    PagePool pool_;
    int32_t max_levels_;
    Gauge<int32_t> num_branches_;
    Gauge<int32_t> num_segments_;
    Gauge<int64_t> num_forks_;
    Gauge<int32_t> idle_pages_;
    int32_t num_free_branches_;
    int32_t num_free_segments_;
    uint32_t first_generation_;
    uint32_t segments_version_ = 0;
    Buffer<Branch> branches_;
    Buffer<PageList> tails_;
    Buffer<Segment> segments_;
    Buffer<int32_t> free_branches_;
    Buffer<int32_t> free_segments_;
    Buffer<int32_t> tenant_pages_;
    Buffer<int32_t> tenant_idle_pages_;
};

inline int32_t Tree::open_branch(int32_t parent, int32_t length, int32_t tenant) {
    const int32_t i = free_branches_[index(--num_free_branches_)];
    Branch& branch = branches_[index(i)];
    branch.parent = parent;
    branch.start = length;
    branch.length = length;
    branch.tenant = static_cast<uint16_t>(tenant);
    branch.generation += 1;
    return i;
}

inline void Tree::freeze(Branch& branch, int32_t i) {
    if (branch.length > branch.start) freeze_tail(branch, i);
}

template <typename Emit>
void Tree::fork(int32_t branch, int32_t count, Emit emit) {
    require_branches(count);
    if (count == 0) return;
    Branch& parent = branches_[index(branch)];
    freeze(parent, branch);
    const int32_t segment = parent.parent;
    const int32_t length = parent.length;
    const int32_t tenant = parent.tenant;
    if (segment != kNone) segments_[index(segment)].refs += count;
    for (int32_t k = 0; k < count; ++k) {
        const int32_t i = open_branch(segment, length, tenant);
        emit(k, handle_of(i));
    }
    num_branches_ += count;
    num_forks_ += count;
}

template <typename Leave>
void Tree::release_many(const Handle* branches, int64_t count, Leave leave) {
    // Each branch that was seen gets its next generation at once, so that its second appearance doesn't resolve.
    Branch* const table = branches_.data();
    const std::size_t size = branches_.size();
    for (int64_t k = 0; k < count; ++k) {
        const auto i = static_cast<uint32_t>(branches[k]);
        const auto generation = static_cast<uint32_t>(branches[k] >> 32);
        if (i >= size || (generation & 1u) == 0 || table[i].generation != generation) [[unlikely]] {
            for (int64_t seen = 0; seen < k; ++seen) table[static_cast<uint32_t>(branches[seen])].generation -= 1;
            refuse(branches[k]);
        }
        table[i].generation = generation + 1;
    }
    // Neighbours mostly go on from one segment: give up their holds together.
    int32_t held = kNone;
    int32_t holds = 0;
    const auto give_up = [&] {
        if (held == kNone) return;
        segments_[index(held)].refs -= holds - 1;
        drop(held);
    };
    int32_t* const free = free_branches_.data();
    int32_t num_free = num_free_branches_;
    const uint32_t used_up = first_generation_;
    for (int64_t k = 0; k < count; ++k) {
        const auto i = static_cast<int32_t>(static_cast<uint32_t>(branches[k]));
        Branch& branch = table[i];
        if ((branch.member & branch.queued) != kNone) leave(i);
        if (branch.length > branch.start) give_tail(branch, i);
        if (branch.parent != held) {
            give_up();
            held = branch.parent;
            holds = 0;
        }
        ++holds;
        free[num_free] = i;
        // A place whose generations are used up is never taken again.
        num_free += branch.generation != used_up ? 1 : 0;
    }
    give_up();
    num_free_branches_ = num_free;
    num_branches_ -= static_cast<int32_t>(count);
}

inline int32_t Tree::resolve(Handle handle) const {
    const auto i = static_cast<uint32_t>(handle);
    const auto generation = static_cast<uint32_t>(handle >> 32);
    if (i >= branches_.size() || (generation & 1u) == 0 || branches_[i].generation != generation) [[unlikely]] refuse(handle);
    return static_cast<int32_t>(i);
}

}  // namespace branchline
