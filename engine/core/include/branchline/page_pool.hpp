// Numbered pages, the token ids on them, and lists of pages that grow at the end.
#pragma once

#include <cstdint>

#include "branchline/buffer.hpp"
#include "branchline/gauge.hpp"

namespace branchline {

/// The pages of one owner, in order. Few numbers lie in the list itself, more in chunks of one cache line.
struct PageList {
    static constexpr int32_t kInline = 7;
    int32_t count;
    int32_t ids[kInline];  // the pages; of a list with more than kInline: the first and the last chunk
    bool in_chunks() const { return count > kInline; }
    int32_t first_chunk() const { return ids[0]; }
    int32_t last_chunk() const { return ids[1]; }
};

/// Owns the free pages and the storage of all page lists. Nothing is allocated after construction.
///
/// Every page is free, used (to be zeroed before it is free again) or on exactly one list. Free pages are loose, or they fill a
/// chunk: an owner of many pages gives its full chunks back as they are, and the next such owner gets them so. That is 4 bytes
/// moved for 16 pages. Single pages come from the loose ones.
///
/// A list's chunks hold at least kInline + 1 pages each on average, so num_pages / (kInline + 1) + 1 chunks are enough however
/// the pages are spread.
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
        if (list.in_chunks()) __builtin_prefetch(chunk_ids(list.last_chunk()), 1);
    }
    /// Takes `count` free pages; each must be attached to a list before any other call. Returns their numbers.
    const int32_t* take_ids(int32_t count) {
        if (num_loose_ < count) [[unlikely]] loosen(count);
        num_free_ -= count;
        return loose_.data() + (num_loose_ -= count);
    }
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
    /// Of a list that isn't empty.
    int32_t first_page(const PageList& list) const { return list.in_chunks() ? chunk_ids(list.first_chunk())[0] : list.ids[0]; }
    int32_t last_page(const PageList& list) const {
        return list.in_chunks() ? chunk_ids(list.last_chunk())[(list.count - 1) % kChunk] : list.ids[list.count - 1];
    }
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
    /// Calls visit(page) for each free page.
    template <typename Visit>
    void for_each_free(Visit visit) const;
    const int32_t* used_pages() const { return used_.data(); }
    int32_t num_chunks() const { return static_cast<int32_t>(empty_chunks_.size()); }
    /// Chunks on no list: empty ones, or full of free pages.
    int32_t num_free_chunks() const { return num_empty_chunks_ + num_full_chunks_; }
    int32_t free_chunk(int32_t i) const {
        return i < num_empty_chunks_ ? empty_chunks_[at(i)] : full_chunks_[at(i - num_empty_chunks_)];
    }
    int32_t next_chunk(int32_t chunk) const { return chunk_next_[static_cast<std::size_t>(chunk)]; }

  private:
    static std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }
    int32_t* chunk_ids(int32_t chunk) { return chunks_.data() + at(chunk) * kChunk; }
    const int32_t* chunk_ids(int32_t chunk) const { return chunks_.data() + at(chunk) * kChunk; }
    int32_t take_empty_chunk() { return empty_chunks_[at(--num_empty_chunks_)]; }
    void give_empty_chunk(int32_t chunk) { empty_chunks_[at(num_empty_chunks_++)] = chunk; }
    void link(PageList& list, int32_t chunk, bool first);
    void loosen(int32_t count);
    void give(int32_t page);

    int32_t num_pages_;
    int32_t page_tokens_;
    bool keep_used_;
    Gauge<int32_t> num_free_;
    Gauge<int32_t> num_used_;
    int32_t num_loose_ = 0;
    int32_t num_full_chunks_ = 0;
    int32_t num_empty_chunks_ = 0;
    Buffer<int32_t> loose_;   // a stack with kChunk entries to spare; what lies above its top is scratch
    Buffer<int32_t> used_;    // the same
    Buffer<int32_t> tokens_;  // [num_pages, page_tokens]
    Buffer<int32_t> chunks_;  // [chunks, kChunk]
    Buffer<int32_t> chunk_next_;
    Buffer<int32_t> chunk_prev_;
    Buffer<int32_t> full_chunks_;   // a stack: of free pages
    Buffer<int32_t> empty_chunks_;  // a stack
};

template <typename Visit>
void PagePool::for_each(const PageList& list, Visit visit) const {
    if (!list.in_chunks()) {
        for (int32_t i = 0; i < list.count; ++i) {
            if (!visit(i, list.ids[i])) return;
        }
        return;
    }
    int32_t chunk = list.first_chunk();
    for (int32_t i = 0; i < list.count; ++i) {
        if (!visit(i, chunk_ids(chunk)[i % kChunk])) return;
        if (i % kChunk == kChunk - 1) chunk = chunk_next_[at(chunk)];
    }
}

template <typename Visit>
void PagePool::for_each_free(Visit visit) const {
    for (int32_t i = 0; i < num_loose_; ++i) visit(loose_[at(i)]);
    for (int32_t c = 0; c < num_full_chunks_; ++c) {
        for (int32_t i = 0; i < kChunk; ++i) visit(chunk_ids(full_chunks_[at(c)])[i]);
    }
}

/// Puts a chunk at the end of a list.
inline void PagePool::link(PageList& list, int32_t chunk, bool first) {
    if (first) {
        list.ids[0] = chunk;
    } else {
        chunk_next_[at(list.last_chunk())] = chunk;
        chunk_prev_[at(chunk)] = list.last_chunk();
    }
    list.ids[1] = chunk;
}

inline void PagePool::attach(PageList& list, int32_t page) {
    const int32_t i = list.count++;
    if (i < PageList::kInline) {
        list.ids[i] = page;
        return;
    }
    if (i == PageList::kInline) {
        const int32_t chunk = take_empty_chunk();
        for (int32_t k = 0; k < PageList::kInline; ++k) chunk_ids(chunk)[k] = list.ids[k];
        link(list, chunk, true);
    } else if (i % kChunk == 0) {
        link(list, take_empty_chunk(), false);
    }
    chunk_ids(list.last_chunk())[i % kChunk] = page;
}

inline int32_t PagePool::take(PageList& list) {
    const int32_t page = *take_ids(1);
    attach(list, page);
    return page;
}

}  // namespace branchline
