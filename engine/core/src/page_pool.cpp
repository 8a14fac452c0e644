#include "branchline/page_pool.hpp"

#include <algorithm>
#include <cstring>

namespace branchline {

namespace {
std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }
}  // namespace

PagePool::PagePool(int32_t num_pages, int32_t page_tokens)
    : num_pages_(num_pages),
      page_tokens_(page_tokens),
      num_free_(num_pages),
      num_free_chunks_(num_pages / (PageList::kInline + 1) + 1),
      free_(at(num_pages)),
      tokens_(at(num_pages) * at(page_tokens)),
      chunks_(at(num_free_chunks_) * kChunk),
      chunk_next_(at(num_free_chunks_)),
      chunk_prev_(at(num_free_chunks_)),
      free_chunks_(at(num_free_chunks_)) {
    // Stacks that hand out ascending numbers at first.
    for (int32_t i = 0; i < num_pages; ++i) free_[at(i)] = num_pages - 1 - i;
    for (int32_t i = 0; i < num_free_chunks_; ++i) free_chunks_[at(i)] = num_free_chunks_ - 1 - i;
}

void PagePool::append(PageList& list, int32_t page) {
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

int32_t PagePool::take(PageList& list) {
    const int32_t page = free_[at(--num_free_)];
    append(list, page);
    return page;
}

void PagePool::give_last(PageList& list) {
    free_[at(num_free_++)] = list.last_page;
    const int32_t i = --list.count;
    if (i >= PageList::kInline && ((i - PageList::kInline) & (kChunk - 1)) == 0) {
        const int32_t chunk = list.last_chunk;
        free_chunks_[at(num_free_chunks_++)] = chunk;
        if (i > PageList::kInline) list.last_chunk = chunk_prev_[at(chunk)];
    }
    if (i > PageList::kInline) {
        list.last_page = chunks_[at(list.last_chunk) * kChunk + at((i - 1 - PageList::kInline) & (kChunk - 1))];
    } else if (i > 0) {
        list.last_page = list.inline_ids[i - 1];
    }
}

void PagePool::give_all(PageList& list) {
    int32_t* out = free_.data() + num_free_;
    copy_ids(list, list.count, out);
    std::reverse(out, out + list.count);  // taken again in the same order
    num_free_ += list.count;
    if (list.count > PageList::kInline) {
        int32_t chunk = list.first_chunk;
        for (;;) {
            free_chunks_[at(num_free_chunks_++)] = chunk;
            if (chunk == list.last_chunk) break;
            chunk = chunk_next_[at(chunk)];
        }
    }
    list.count = 0;
}

void PagePool::copy_ids(const PageList& list, int32_t count, int32_t* out) const {
    const int32_t head = std::min(count, PageList::kInline + 0);
    for (int32_t i = 0; i < head; ++i) out[i] = list.inline_ids[i];
    out += head;
    int32_t rest = count - head;
    int32_t chunk = list.first_chunk;
    while (rest > 0) {
        const int32_t* ids = chunks_.data() + at(chunk) * kChunk;
        if (rest < kChunk) {
            for (int32_t i = 0; i < rest; ++i) out[i] = ids[i];
            return;
        }
        std::memcpy(out, ids, kChunk * sizeof(int32_t));
        out += kChunk;
        rest -= kChunk;
        if (rest > 0) chunk = chunk_next_[at(chunk)];
    }
}

}  // namespace branchline
