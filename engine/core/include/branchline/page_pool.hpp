// Numbered pages, the token ids on them, and lists of pages that grow at the end.
#pragma once

#include <cstdint>

#include "branchline/buffer.hpp"

namespace branchline {

/// The pages of one owner, in order. The first few numbers lie in the list itself, the rest in chunks of one cache line.
struct PageList {
    static constexpr int kInline = 4;
    int32_t inline_ids[kInline];
    int32_t first_chunk;  // meaningful when count > kInline
    int32_t last_chunk;
    int32_t count;
    int32_t last_page;  // meaningful when count > 0
};

/// Owns the free pages and the storage of all page lists. Nothing is allocated after construction.
///
/// Every page is either free or on exactly one list. An owner with at most `PageList::kInline` pages takes no chunk, so
/// num_pages / (kInline + 1) + 1 chunks are enough however the pages are spread.
class PagePool {
  public:
    static constexpr int kChunk = 16;
    static constexpr int kChunkBits = 4;

    PagePool(int32_t num_pages, int32_t page_tokens);

    int32_t num_pages() const { return num_pages_; }
    int32_t num_free() const { return num_free_; }
    int32_t page_tokens() const { return page_tokens_; }

    /// Moves a free page to the end of `list` and returns it. There must be a free page.
    int32_t take(PageList& list);
    /// Returns the last page of `list` to the free ones. The list must not be empty.
    void give_last(PageList& list);
    /// Returns all pages of `list`.
    void give_all(PageList& list);
    /// Writes the first `count` page numbers of `list`.
    void copy_ids(const PageList& list, int32_t count, int32_t* out) const;
    /// Calls visit(index, page) in order.
    template <typename Visit>
    void for_each(const PageList& list, Visit visit) const;

    int32_t* tokens_of(int32_t page) { return tokens_.data() + static_cast<int64_t>(page) * page_tokens_; }
    const int32_t* tokens_of(int32_t page) const { return tokens_.data() + static_cast<int64_t>(page) * page_tokens_; }
    int32_t* tokens() { return tokens_.data(); }

    // For check().
    const int32_t* free_pages() const { return free_.data(); }
    int32_t num_chunks() const { return static_cast<int32_t>(free_chunks_.size()); }
    int32_t num_free_chunks() const { return num_free_chunks_; }
    const int32_t* free_chunks() const { return free_chunks_.data(); }
    int32_t next_chunk(int32_t chunk) const { return chunk_next_[static_cast<std::size_t>(chunk)]; }

  private:
    void append(PageList& list, int32_t page);

    int32_t num_pages_;
    int32_t page_tokens_;
    int32_t num_free_;
    int32_t num_free_chunks_;
    Buffer<int32_t> free_;    // a stack
    Buffer<int32_t> tokens_;  // [num_pages, page_tokens]
    Buffer<int32_t> chunks_;  // [chunks, kChunk]
    Buffer<int32_t> chunk_next_;
    Buffer<int32_t> chunk_prev_;
    Buffer<int32_t> free_chunks_;  // a stack
};

template <typename Visit>
void PagePool::for_each(const PageList& list, Visit visit) const {
    for (int32_t i = 0; i < list.count && i < PageList::kInline; ++i) visit(i, list.inline_ids[i]);
    int32_t chunk = list.first_chunk;
    for (int32_t i = PageList::kInline; i < list.count; ++i) {
        const int32_t at = (i - PageList::kInline) & (kChunk - 1);
        visit(i, chunks_[static_cast<std::size_t>(chunk) * kChunk + static_cast<std::size_t>(at)]);
        if (at == kChunk - 1) chunk = chunk_next_[static_cast<std::size_t>(chunk)];
    }
}

}  // namespace branchline
