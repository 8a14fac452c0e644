// The steps in which no row joins or leaves: O(rows) stores, and a page for each row that has filled its last.

#include <cstring>

#include "branchline/batch.hpp"

namespace branchline {

namespace {

/// Moves `count` numbers up by `by` places. A call of memmove costs more than a few numbers do.
void move_up(int32_t* ids, int32_t count, int32_t by) {
    if (count > 12) {
        std::memmove(ids + by, ids, sizeof(int32_t) * static_cast<std::size_t>(count));
        return;
    }
    for (int32_t i = count - 1; i >= 0; --i) ids[i + by] = ids[i];
}

}  // namespace

/// A step of the same rows, one token each.
void Batch::advance() {
    const int32_t rows = num_rows_;
    const int32_t page_tokens = tree_.pool().page_tokens();
    int32_t* __restrict const fill = row_fill_.data();
    int32_t full = 0;
    for (int32_t r = 0; r < rows; ++r) full += fill[r] == page_tokens ? 1 : 0;
    if (full > 0) {
        if (table_width_ > 0) require_width(int64_t{longest_} + 1);
        require_pages(full, "the step");
        cross(full);
    }
    num_copies_ = 0;
    // Restrict, else the compiler won't make vectors of it.
    int32_t* __restrict const write = row_write_.data();
    int32_t* __restrict const length = row_length_.data();
    int32_t* __restrict const last_out = table_width_ > 0 ? table_lengths_.data() : levels_.own().last_page_len;
    int32_t* __restrict const write_out = write_slots_.data();
    int32_t* __restrict const position_out = positions_.data();
    for (int32_t r = 0; r < rows; ++r) {
        fill[r] += 1;
        write_out[r] = write[r] += 1;
        position_out[r] = length[r];
        length[r] += 1;
    }
    copy_ints(last_out, table_width_ > 0 ? length : fill, rows);
    longest_ += 1;
    const int32_t* __restrict const slot = row_slot_.data();
    const int32_t* __restrict const next = next_tokens_.data();
    int32_t* __restrict const store = tree_.pool().tokens();
    int32_t* __restrict const token_out = token_ids_.data();
    for (int32_t r = 0; r < rows; ++r) {
        const int32_t token = next[slot[r]];
        token_out[r] = token;
        store[write[r]] = token;
    }
}

/// Gives each of the `count` rows whose last page is full a new one, and makes room for it in the last level's table.
void Batch::cross(int32_t count) {
    const int32_t rows = num_rows_;
    const int32_t page_tokens = tree_.pool().page_tokens();
    int32_t* const fill = row_fill_.data();
    int32_t* const crossing = crossing_.data();
    int32_t found = 0;
    for (int32_t r = 0; r < rows; ++r) {  // no branch: which rows cross can't be predicted
        crossing[found] = r;
        found += fill[r] == page_tokens ? 1 : 0;
    }
    // What the rows' lists need lies in as many places: ask for all of it, then use it.
    for (int32_t k = 0; k < count; ++k) {
        const int32_t r = crossing[k];
        tree_.prefetch_tail(row_branch_[at(r)]);
        if (table_width_ > 0) __builtin_prefetch(&table_[at(r) * at(table_width_) + at(row_pages_[at(r)])], 1);
    }
    for (int32_t k = 0; k < count; ++k) tree_.pool().prefetch_end(tree_.tail(row_branch_[at(crossing[k])]));
    const int32_t* const pages = tree_.pool().take_ids(count);
    for (int32_t k = 0; k < count; ++k) {
        const int32_t r = crossing[k];
        tree_.attach_page(row_branch_[at(r)], pages[k]);
        row_write_[at(r)] = pages[k] * page_tokens - 1;
        fill[r] = 0;
    }
    if (table_width_ > 0) {
        for (int32_t k = 0; k < count; ++k) {
            const int32_t r = crossing[k];
            table_[at(r) * at(table_width_) + at(row_pages_[at(r)]++)] = pages[k];
        }
        return;
    }
    // Move each run of rows between two that cross by as many places as rows before it cross; the last one first.
    LevelArrays& own = levels_.own();
    int32_t* const kv = row_kv_.data();
    int32_t* const ids = own.kv_indices;
    own.num_indices += count;
    int32_t end = kv[rows];
    for (int32_t k = count - 1; k >= 0; --k) {
        const int32_t begin = kv[crossing[k] + 1];
        move_up(ids + begin, end - begin, k + 1);
        ids[begin + k] = pages[k];
        end = begin;
    }
    int32_t* __restrict const out = own.kv_indptr;
    for (int32_t k = 0; k < count; ++k) {
        const int32_t stop = k + 1 < count ? crossing[k + 1] : rows;
        for (int32_t r = crossing[k] + 1; r <= stop; ++r) out[r] = kv[r] += k + 1;
    }
}

}  // namespace branchline
