// Numbered pages, the token ids on them, and lists of pages that grow at the end.
#pragma once

#include <cstdint>

#include "branchline/buffer.hpp"
#include "branchline/gauge.hpp"

namespace branchline {

/// The pages of one owner, in order. The first few numbers lie in the list itself, the rest in chunks of one cache line.
struct PageList {
    static constexpr int32_t kInline = 4;
    int32_t inline_ids[kInline];
    int32_t first_chunk;  // meaningful when count > kInline
    int32_t last_chunk;
    int32_t count;
    int32_t last_page;  // meaningful when count > 0
};

/// Owns the free pages and the storage of all page lists. Nothing is allocated after construction.
///
/// Every page is free, used (to be zeroed before it is free again) or on exactly one list. An owner with at most
/// `PageList::kInline` pages takes no chunk, so num_pages / (kInline + 1) + 1 chunks are enough however they are spread.
class PagePool {
  public:
    static constexpr int32_t kChunk = 16;

    /// `keep_used`: pages that are given back wait in a list of their own until `take_used`.
    PagePool(int32_t num_pages, int32_t page_tokens, bool keep_used);

    int32_t num_pages() const { return num_pages_; }
    int32_t num_free() const { return num_free_; }
    int32_t num_used() const { return num_used_; }
    int32_t page_tokens() const { return page_tokens_; }

    /// Moves a free page to the end of `list` and returns it. There must be a free page.
    int32_t take(PageList& list);
    /// Asks for the memory that `attach` will write.
    void prefetch_end(const PageList& list) const {
        if (list.count > PageList::kInline) __builtin_prefetch(&chunks_[static_cast<std::size_t>(list.last_chunk) * kChunk], 1);
    }
    /// Takes `count` free pages; each must be attached to a list before any other call. Returns their numbers.
    const int32_t* take_ids(int32_t count) { return free_.data() + (num_free_ -= count); }
    /// Moves `count` free pages to the end of `list`, which must be empty.
    void take_many(PageList& list, int32_t count);
    /// Gives the last page of `list` back. The list must not be empty.
    void give_last(PageList& list);
    /// Gives all pages of `list` back.
    void give_all(PageList& list);
    /// Takes the last page off `list` without giving it back, and returns it.
    int32_t detach_last(PageList& list);
    /// Puts a page that was detached at the end of `list`.
    void attach(PageList& list, int32_t page);
    /// Moves the first `count` pages of `list` (0 < count < its own) to `upper`, which must be empty.
    void split(PageList& list, int32_t count, PageList& upper);
    /// Writes the first `count` page numbers of `list`.
    void copy_ids(const PageList& list, int32_t count, int32_t* out) const;
    /// Calls visit(index, page) in order until it returns false.
    template <typename Visit>
    void for_each(const PageList& list, Visit visit) const;
    /// Writes the used pages' numbers and makes them free. Returns how many.
    int32_t take_used(int32_t* out);

    int32_t* tokens_of(int32_t page) { return tokens_.data() + static_cast<int64_t>(page) * page_tokens_; }
    const int32_t* tokens_of(int32_t page) const { return tokens_.data() + static_cast<int64_t>(page) * page_tokens_; }
    int32_t* tokens() { return tokens_.data(); }

    // For check().
    const int32_t* free_pages() const { return free_.data(); }
    const int32_t* used_pages() const { return used_.data(); }
    int32_t num_chunks() const { return static_cast<int32_t>(free_chunks_.size()); }
    int32_t num_free_chunks() const { return num_free_chunks_; }
    const int32_t* free_chunks() const { return free_chunks_.data(); }
    int32_t next_chunk(int32_t chunk) const { return chunk_next_[static_cast<std::size_t>(chunk)]; }

  private:
    void give(int32_t page);
    void free_chunks_of(const PageList& list);

    int32_t num_pages_;
    int32_t page_tokens_;
    bool keep_used_;
    Gauge<int32_t> num_free_;
    Gauge<int32_t> num_used_;
    int32_t num_free_chunks_;
    Buffer<int32_t> free_;    // a stack with kChunk entries to spare; what lies above its top is scratch
    Buffer<int32_t> used_;    // the same
    Buffer<int32_t> tokens_;  // [num_pages, page_tokens]
    Buffer<int32_t> chunks_;  // [chunks, kChunk]
    Buffer<int32_t> chunk_next_;
    Buffer<int32_t> chunk_prev_;
    Buffer<int32_t> free_chunks_;  // a stack
};

template <typename Visit>
void PagePool::for_each(const PageList& list, Visit visit) const {
    for (int32_t i = 0; i < list.count && i < PageList::kInline; ++i) {
        if (!visit(i, list.inline_ids[i])) return;
    }
    int32_t chunk = list.first_chunk;
    for (int32_t i = PageList::kInline; i < list.count; ++i) {
        const int32_t at = (i - PageList::kInline) % kChunk;
        if (!visit(i, chunks_[static_cast<std::size_t>(chunk) * kChunk + static_cast<std::size_t>(at)])) return;
        if (at == kChunk - 1) chunk = chunk_next_[static_cast<std::size_t>(chunk)];
    }
}

inline void PagePool::attach(PageList& list, int32_t page) {
    const auto at = [](int32_t i) { return static_cast<std::size_t>(i); };
    const int32_t i = list.count;
    if (i < PageList::kInline) {
        list.inline_ids[i] = page;
    } else {
        const int32_t slot = (i - PageList::kInline) & (kChunk - 1);
        if (slot == 0) {
            const int32_t chunk = free_chunks_[at(--num_free_chunks_)];
            if (i == PageList::kInline) {
                list.first_chunk = chunk;
            } else {
                chunk_next_[at(list.last_chunk)] = chunk;
                chunk_prev_[at(chunk)] = list.last_chunk;
            }
            list.last_chunk = chunk;
        }
        chunks_[at(list.last_chunk) * kChunk + at(slot)] = page;
    }
    list.last_page = page;
    list.count = i + 1;
}

inline int32_t PagePool::take(PageList& list) {
    const int32_t page = free_[static_cast<std::size_t>(num_free_ -= 1)];
    attach(list, page);
    return page;
}

}  // namespace branchline
