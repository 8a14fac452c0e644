#include "branchline/page_pool.hpp"

#include <algorithm>
#include <cstring>

namespace branchline {

namespace {

std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }

/// Copies a whole chunk, however many of its numbers count: a few vector moves instead of a loop. The stacks have kChunk
/// entries more than they need, so that this stays inside them.
template <int32_t Count>
void copy_ids_wide(int32_t* out, const int32_t* in) {
    std::memcpy(out, in, sizeof(int32_t) * at(Count));
}

}  // namespace

PagePool::PagePool(int32_t num_pages, int32_t page_tokens, bool keep_used)
    : num_pages_(num_pages),
      page_tokens_(page_tokens),
      keep_used_(keep_used),
      num_free_(num_pages),
      num_used_(0),
      num_free_chunks_(num_pages / (PageList::kInline + 1) + 1),
      free_(at(num_pages) + kChunk),
      used_(keep_used ? at(num_pages) + kChunk : 0),
      tokens_(at(num_pages) * at(page_tokens)),
      chunks_(at(num_free_chunks_) * kChunk),
      chunk_next_(at(num_free_chunks_)),
      chunk_prev_(at(num_free_chunks_)),
      free_chunks_(at(num_free_chunks_)) {
    // Stacks that hand out ascending numbers at first.
    for (int32_t i = 0; i < num_pages; ++i) free_[at(i)] = num_pages - 1 - i;
    for (int32_t i = 0; i < num_free_chunks_; ++i) free_chunks_[at(i)] = num_free_chunks_ - 1 - i;
}

void PagePool::take_many(PageList& list, int32_t count) {
    list.count = count;
    if (count == 0) return;
    const int32_t* ids = free_.data() + (num_free_ -= count);
    list.last_page = ids[count - 1];
    copy_ids_wide<PageList::kInline>(list.inline_ids, ids);
    for (int32_t done = PageList::kInline; done < count; done += kChunk) {
        const int32_t chunk = free_chunks_[at(--num_free_chunks_)];
        if (done == PageList::kInline) {
            list.first_chunk = chunk;
        } else {
            chunk_next_[at(list.last_chunk)] = chunk;
            chunk_prev_[at(chunk)] = list.last_chunk;
        }
        list.last_chunk = chunk;
        copy_ids_wide<kChunk>(chunks_.data() + at(chunk) * kChunk, ids + done);
    }
}

void PagePool::give(int32_t page) {
    if (keep_used_) {
        used_[at((num_used_ += 1) - 1)] = page;
    } else {
        free_[at((num_free_ += 1) - 1)] = page;
    }
}

int32_t PagePool::detach_last(PageList& list) {
    const int32_t page = list.last_page;
    const int32_t i = --list.count;
    if (i >= PageList::kInline && (i - PageList::kInline) % kChunk == 0) {
        const int32_t chunk = list.last_chunk;
        free_chunks_[at(num_free_chunks_++)] = chunk;
        if (i > PageList::kInline) list.last_chunk = chunk_prev_[at(chunk)];
    }
    if (i > PageList::kInline) {
        list.last_page = chunks_[at(list.last_chunk) * kChunk + at((i - 1 - PageList::kInline) % kChunk)];
    } else if (i > 0) {
        list.last_page = list.inline_ids[i - 1];
    }
    return page;
}

void PagePool::give_last(PageList& list) { give(detach_last(list)); }

void PagePool::free_chunks_of(const PageList& list) {
    if (list.count <= PageList::kInline) return;
    int32_t chunk = list.first_chunk;
    for (;;) {
        free_chunks_[at(num_free_chunks_++)] = chunk;
        if (chunk == list.last_chunk) return;
        chunk = chunk_next_[at(chunk)];
    }
}

void PagePool::give_all(PageList& list) {
    Gauge<int32_t>& top = keep_used_ ? num_used_ : num_free_;
    int32_t* out = (keep_used_ ? used_ : free_).data() + top;
    const int32_t count = list.count;
    copy_ids_wide<PageList::kInline>(out, list.inline_ids);
    int32_t chunk = list.first_chunk;
    for (int32_t done = PageList::kInline; done < count; done += kChunk) {
        copy_ids_wide<kChunk>(out + done, chunks_.data() + at(chunk) * kChunk);
        free_chunks_[at(num_free_chunks_++)] = chunk;
        if (done + kChunk < count) chunk = chunk_next_[at(chunk)];
    }
    top += count;
    list.count = 0;
}

void PagePool::split(PageList& list, int32_t count, PageList& upper) {
    int32_t* const ids = free_.data() + num_free_;  // these pages aren't free, so there is room
    const int32_t total = list.count;
    copy_ids(list, total, ids);
    free_chunks_of(list);
    list.count = 0;
    for (int32_t i = 0; i < count; ++i) attach(upper, ids[i]);
    for (int32_t i = count; i < total; ++i) attach(list, ids[i]);
}

int32_t PagePool::take_used(int32_t* out) {
    const int32_t count = num_used_;
    for (int32_t i = 0; i < count; ++i) {
        out[i] = used_[at(i)];
        free_[at(num_free_ + i)] = used_[at(i)];
    }
    num_used_ = 0;
    num_free_ += count;
    return count;
}

void PagePool::copy_ids(const PageList& list, int32_t count, int32_t* out) const {
    const int32_t head = std::min(count, PageList::kInline);
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
