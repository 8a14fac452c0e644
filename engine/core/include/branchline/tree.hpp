// Branches and the segments that they share.
#pragma once

#include <cstdint>
#include <string>

#include "branchline/buffer.hpp"
#include "branchline/errors.hpp"
#include "branchline/page_pool.hpp"

namespace branchline {

using Handle = uint64_t;

constexpr int32_t kNone = -1;

/// How what follows a segment goes on after its last page. Decided once, when the segment is made.
enum class Boundary : int32_t {
    aligned,  // the last page is full: the follower starts on a fresh page, tables can be joined
    hard,     // half a page, read as the end of a level of its own: the follower starts on a fresh page
    copied,   // half a page, whose filled part each follower copies into its own first page
};

/// An immutable run of tokens with its pages. `refs` counts the branches and segments that go on from it.
struct Segment {
    int32_t parent;
    int32_t refs;
    int32_t start;  // position of its first own token
    int32_t end;
    int32_t lead;            // tokens before `start` that its first page holds as a copy
    int32_t hard_above;      // hard boundaries in the chain above it
    int32_t depth;           // segments in the chain, itself included
    Boundary boundary;
    PageList pages;
};

/// A pointer to a segment and a tail that grows. Free branches have an empty tail, lead 0 and are in no batch.
struct Branch {
    int32_t parent;
    int32_t start;   // position of the tail's first own token; the tokens before it are the parent's
    int32_t length;  // tokens in all; out of date while the branch is a row of a batch (see Batch)
    int32_t lead;    // tokens before `start` that the tail's first page holds as a copy
    uint32_t generation;  // odd while the branch lives
    int32_t member;  // index among the batch's decode rows, or kNone
    int32_t row;     // row of the batch's layout that holds its length, or kNone
    int32_t queued;  // index among the queued prefill rows, or kNone
};

/// One page's filled part that must be copied before a step.
struct PageCopy {
    int32_t src;
    int32_t dst;
    int32_t tokens;
};

/// Owns all branches, segments and pages. Lengths of branches must be up to date when a member is called.
class Tree {
  public:
    Tree(int32_t num_pages, int32_t page_tokens, int32_t max_branches, int32_t max_levels);

    /// Index of a live branch. Throws ReleasedHandleError.
    int32_t resolve(Handle handle) const;
    Handle handle_of(int32_t branch) const {
        return static_cast<Handle>(branches_[static_cast<std::size_t>(branch)].generation) << 32 | static_cast<uint32_t>(branch);
    }

    /// Throws OutOfBranchesError if there is no room for `count` more.
    void require_branches(int32_t count) const;
    int32_t root();
    /// Makes `count` children and calls emit(i, handle). All or none. Throws OutOfBranchesError.
    template <typename Emit>
    void fork(int32_t branch, int32_t count, Emit emit);
    void release(int32_t branch);
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
    int32_t depth(int32_t branch) const {
        const int32_t parent = branches_[index(branch)].parent;
        return parent == kNone ? 0 : segments_[index(parent)].depth;
    }
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

    /// Throws CoreError that names the first broken invariant.
    void check() const;

  private:
    static std::size_t index(int32_t i) { return static_cast<std::size_t>(i); }

    int32_t open_branch(int32_t parent, int32_t length);
    void freeze(Branch& branch, int32_t i);
    void drop(int32_t segment);
    void shorten(Branch& branch, int32_t i, int32_t num_tokens);

    PagePool pool_;
    int32_t max_levels_;
    int32_t num_branches_ = 0;
    int32_t num_segments_ = 0;
    int32_t num_free_branches_;
    int32_t num_free_segments_;
    uint32_t first_generation_;
    Buffer<Branch> branches_;
    Buffer<PageList> tails_;
    Buffer<Segment> segments_;
    Buffer<int32_t> free_branches_;
    Buffer<int32_t> free_segments_;
};

template <typename Emit>
void Tree::fork(int32_t branch, int32_t count, Emit emit) {
    require_branches(count);
    if (count == 0) return;
    Branch& parent = branches_[index(branch)];
    freeze(parent, branch);
    const int32_t segment = parent.parent;
    const int32_t length = parent.length;
    if (segment != kNone) segments_[index(segment)].refs += count;
    for (int32_t i = 0; i < count; ++i) emit(i, handle_of(open_branch(segment, length)));
}

inline int32_t Tree::open_branch(int32_t parent, int32_t length) {
    const int32_t i = free_branches_[index(--num_free_branches_)];
    Branch& branch = branches_[index(i)];
    branch.parent = parent;
    branch.start = length;
    branch.length = length;
    branch.generation += 1;
    ++num_branches_;
    return i;
}

}  // namespace branchline
