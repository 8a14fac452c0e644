#include "branchline/page_pool.hpp"

#include <algorithm>
#include <cstring>

namespace branchline {

namespace {

/// Copies so many numbers, however many of them count: a few vector moves instead of a loop. Stacks have kChunk entries more
/// than they need, so that this stays inside them.
template <int32_t Count>
void copy_wide(int32_t* out, const int32_t* in) {
    std::memcpy(out, in, sizeof(int32_t) * static_cast<std::size_t>(Count));
}

}  // namespace

PagePool::PagePool(int32_t num_pages, int32_t page_tokens, bool keep_used)
    : num_pages_(num_pages),
      page_tokens_(page_tokens),
      keep_used_(keep_used),
      num_free_(num_pages),
      num_used_(0),
      loose_(at(num_pages) + kChunk),
      used_(keep_used ? at(num_pages) + kChunk : 0),
      tokens_(at(num_pages) * at(page_tokens)),
      chunks_((at(num_pages) / (PageList::kInline + 1) + 1) * kChunk),
      chunk_next_(chunks_.size() / kChunk),
      chunk_prev_(chunks_.size() / kChunk),
      full_chunks_(chunks_.size() / kChunk),
      empty_chunks_(chunks_.size() / kChunk) {
    // Stacks that hand out ascending numbers at first.
    const int32_t full = num_pages / kChunk;
    const int32_t rest = num_pages % kChunk;
    for (int32_t page = rest - 1; page >= 0; --page) loose_[at(num_loose_++)] = page;
    for (int32_t c = num_chunks() - 1; c >= full; --c) give_empty_chunk(c);
    for (int32_t c = full - 1; c >= 0; --c) {
        full_chunks_[at(num_full_chunks_++)] = c;
        for (int32_t i = 0; i < kChunk; ++i) chunk_ids(c)[i] = rest + c * kChunk + i;
    }
}

/// Empties full chunks until at least `count` free pages are loose. So many must be free.
void PagePool::loosen(int32_t count) {
    while (num_loose_ < count) {
        const int32_t chunk = full_chunks_[at(--num_full_chunks_)];
        const int32_t* ids = chunk_ids(chunk);
        for (int32_t i = 0; i < kChunk; ++i) loose_[at(num_loose_ + i)] = ids[kChunk - 1 - i];
        num_loose_ += kChunk;
        give_empty_chunk(chunk);
    }
}

void PagePool::take_many(PageList& list, int32_t count) {
    list.count = count;
    if (count <= PageList::kInline) {
        copy_wide<PageList::kInline>(list.ids, take_ids(count));
        return;
    }
    int32_t done = 0;
    for (; done + kChunk <= count && num_full_chunks_ > 0; done += kChunk) {
        link(list, full_chunks_[at(--num_full_chunks_)], done == 0);
    }
    num_free_ -= done;
    while (done < count) {
        const int32_t some = std::min(count - done, kChunk);
        const int32_t* const ids = take_ids(some);  // first: it may empty the chunk that is taken next
        const int32_t chunk = take_empty_chunk();
        copy_wide<kChunk>(chunk_ids(chunk), ids);
        link(list, chunk, done == 0);
        done += some;
    }
}

void PagePool::give(int32_t page) {
    if (keep_used_) {
        used_[at((num_used_ += 1) - 1)] = page;
    } else {
        num_free_ += 1;
        loose_[at(num_loose_++)] = page;
    }
}

int32_t PagePool::detach_last(PageList& list) {
    const int32_t page = last_page(list);
    const int32_t i = list.count - 1;
    if (i >= PageList::kInline) {
        const int32_t chunk = list.last_chunk();
        if (i == PageList::kInline) {
            copy_wide<PageList::kInline>(list.ids, chunk_ids(chunk));
            give_empty_chunk(chunk);
        } else if (i % kChunk == 0) {
            list.ids[1] = chunk_prev_[at(chunk)];
            give_empty_chunk(chunk);
        }
    }
    list.count = i;
    return page;
}

void PagePool::give_last(PageList& list) { give(detach_last(list)); }

void PagePool::give_all(PageList& list) {
    const int32_t count = list.count;
    list.count = 0;
    int32_t* out = keep_used_ ? used_.data() + num_used_ : loose_.data() + num_loose_;
    (keep_used_ ? num_used_ : num_free_) += count;
    int32_t copied = count;
    if (count <= PageList::kInline) {
        copy_wide<PageList::kInline>(out, list.ids);
    } else {
        int32_t chunk = list.first_chunk();
        for (int32_t rest = count;; rest -= kChunk) {
            if (rest >= kChunk && !keep_used_) {
                full_chunks_[at(num_full_chunks_++)] = chunk;
                copied -= kChunk;
            } else {
                copy_wide<kChunk>(out, chunk_ids(chunk));
                out += kChunk;
                give_empty_chunk(chunk);
            }
            if (rest <= kChunk) break;
            chunk = chunk_next_[at(chunk)];
        }
    }
    if (!keep_used_) num_loose_ += copied;
}

void PagePool::split(PageList& list, int32_t count, PageList& upper) {
    int32_t* const ids = loose_.data() + num_loose_;  // these pages aren't free, so there is room
    const int32_t total = list.count;
    copy_ids(list, total, ids);
    if (list.in_chunks()) {
        for (int32_t chunk = list.first_chunk();; chunk = chunk_next_[at(chunk)]) {
            give_empty_chunk(chunk);
            if (chunk == list.last_chunk()) break;
        }
    }
    list.count = 0;
    for (int32_t i = 0; i < count; ++i) attach(upper, ids[i]);
    for (int32_t i = count; i < total; ++i) attach(list, ids[i]);
}

int32_t PagePool::take_used(int32_t* out) {
    const int32_t count = num_used_;
    for (int32_t i = 0; i < count; ++i) out[i] = loose_[at(num_loose_ + i)] = used_[at(i)];
    num_used_ = 0;
    num_free_ += count;
    num_loose_ += count;
    return count;
}

void PagePool::copy_ids(const PageList& list, int32_t count, int32_t* out) const {
    if (!list.in_chunks()) {
        for (int32_t i = 0; i < count; ++i) out[i] = list.ids[i];
        return;
    }
    int32_t chunk = list.first_chunk();
    for (int32_t rest = count; rest > 0; rest -= kChunk) {
        const int32_t* const ids = chunk_ids(chunk);
        if (rest < kChunk) {
            for (int32_t i = 0; i < rest; ++i) out[i] = ids[i];
            return;
        }
        copy_wide<kChunk>(out, ids);
        out += kChunk;
        chunk = chunk_next_[at(chunk)];
    }
}

}  // namespace branchline
