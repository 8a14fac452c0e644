// The prefix cache: finds segments by the tokens that they hold.
#pragma once

#include <cstdint>
#include <string>

#include "branchline/buffer.hpp"
#include "branchline/tree.hpp"

namespace branchline {

/// Tokens that the index has, and how many of their pages nobody else holds.
struct Found {
    int32_t tokens;
    int32_t idle_pages;
};

/// The first `tokens` tokens of `page` are what was looked for; 0: there is no such page.
struct HalfPage {
    int32_t page;
    int32_t tokens;
};

/// A radix tree over segments whose edges are whole pages. It holds each indexed segment, so that its pages outlive the
/// branches, until `evict` takes the least recently used that nobody else holds.
///
/// A segment is found below its parent by a hash of its first page; every page is compared token by token, so that a collision
/// can't share. Tenants never share. Only chains of full pages from the root are indexed. Nothing is allocated after
/// construction.
class PrefixIndex {
  public:
    /// `hash_mask` is applied to every hash: with 0 all of them are the same, and only comparison tells pages apart.
    explicit PrefixIndex(Tree& tree, uint32_t hash_mask = UINT32_MAX);

    /// The longest indexed prefix of `tokens`, in whole pages: its last segment, or kNone. Cuts a segment whose first pages
    /// match. Marks what it found as used.
    int32_t match(const int32_t* tokens, int32_t count, int32_t tenant);
    /// Indexes the branch's full pages as far as they are a chain of full pages, and as no other segment has the same. Its
    /// tail may be cut. Returns the tokens that can be matched now.
    int32_t insert(int32_t branch);
    /// Gives up the least recently used segments that nobody else holds until at least `num_pages` pages were given back, or
    /// none is left. Returns how many were.
    int32_t evict(int32_t num_pages);
    /// Pages that `evict` could give back.
    int32_t count_evictable() const { return tree_.idle_pages(); }
    /// What `match` would find, and how many pages of it are idle. Modifies nothing.
    Found peek(const int32_t* tokens, int32_t count, int32_t tenant) const;
    /// Of the segments indexed below `parent` (kNone: at the root), the first page that begins with most of `tokens`.
    HalfPage half_page(int32_t parent, int32_t tenant, const int32_t* tokens, int32_t count) const;

    int32_t num_segments() const { return num_indexed_; }

    /// Throws CoreError that names the first broken invariant.
    void check() const;

  private:
    struct Link {
        uint32_t hash;  // of (parent, tenant, first page)
        int32_t newer;
        int32_t older;
        // Those with the same parent, tenant and first token (or hash of them), newest first.
        int32_t bucket;
        int32_t next;
        int32_t previous;
    };

    /// Most pages that half_page compares.
    static constexpr int32_t kCandidates = 64;

    static std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }
    uint32_t hash_of(int32_t parent, int32_t tenant, const int32_t* page) const;
    bool same_page(const int32_t* a, const int32_t* b) const;
    int32_t find(int32_t parent, int32_t tenant, const int32_t* page) const;
    const int32_t* first_page(int32_t segment) const;
    int32_t bucket_of(int32_t parent, int32_t tenant, int32_t token) const;
    /// Calls visit(segment, pages, tokens) for each segment of the longest indexed prefix, with what of it is the same, until it
    /// isn't the whole segment.
    template <typename Visit>
    void walk(const int32_t* tokens, int32_t count, int32_t tenant, Visit visit) const;
    void put(int32_t segment);
    void take_out(int32_t segment);
    int32_t cut(int32_t segment, int32_t pages);
    void link_newest(int32_t segment);
    void link_newer_than(int32_t segment, int32_t older);
    void unlink(int32_t segment);
    void touch(int32_t segment);

    Tree& tree_;
    uint32_t hash_mask_;
    uint32_t mask_;
    int32_t num_indexed_ = 0;
    int32_t newest_ = kNone;
    int32_t oldest_ = kNone;
    Buffer<int32_t> table_;  // open addressing; segment + 1, 0 is empty
    Buffer<Link> links_;     // by segment
    Buffer<int32_t> path_;   // scratch of insert
    Buffer<int32_t> heads_;  // by bucket; segment + 1, 0 is empty
};

}  // namespace branchline
