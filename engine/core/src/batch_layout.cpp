// The steps whose rows are not those of the step before: everything is ordered and built anew.

#include <algorithm>

#include "branchline/batch.hpp"

namespace branchline {

/// A step whose rows changed: orders them, appends, and builds all arrays.
void Batch::lay_out() {
    forget_layout();
    const int32_t rows = num_members_ + num_queued_;
    int64_t need = 0;
    for (int32_t e = 0; e < rows; ++e) {
        const bool decodes = e < num_members_;
        entry_branch_[at(e)] = decodes ? members_[at(e)].branch : queue_[at(e - num_members_)].branch;
        need += tree_.pages_needed(entry_branch_[at(e)], decodes ? 1 : queue_[at(e - num_members_)].count);
    }
    if (table_width_ > 0) {
        for (int32_t e = 0; e < rows; ++e) {
            const int64_t length = tree_.branch(entry_branch_[at(e)]).length + (e < num_members_ ? 1 : queue_[at(e - num_members_)].count);
            require_width(length);
        }
    }
    require_pages(need, "the step");

    for (int32_t e = 0; e < rows; ++e) tree_.thaw(entry_branch_[at(e)]);
    levels_.order_rows(entry_branch_.data(), rows, order_.data());
    num_rows_ = rows;
    num_tokens_ = 0;
    num_copies_ = 0;
    row_indptr_[0] = 0;
    for (int32_t r = 0; r < rows; ++r) {
        const int32_t e = order_[at(r)];
        const int32_t branch = entry_branch_[at(e)];
        const bool decodes = e < num_members_;
        const int32_t slot = decodes ? members_[at(e)].slot : queue_[at(e - num_members_)].slot;
        const int32_t count = decodes ? 1 : queue_[at(e - num_members_)].count;
        const int32_t first = num_tokens_;
        const int32_t* tokens = decodes ? next_tokens_.data() + slot : queued_tokens_.data() + queue_[at(e - num_members_)].first;
        Branch& b = tree_.branch(branch);
        for (int32_t t = 0; t < count; ++t) positions_[at(first + t)] = b.length + t;
        copy_ints(token_ids_.data() + first, tokens, count);
        PageCopy copy;
        if (tree_.append(branch, token_ids_.data() + first, count, write_slots_.data() + first, copy)) {
            copy_src_[at(num_copies_)] = copy.src;
            copy_dst_[at(num_copies_)] = copy.dst;
            copy_tokens_[at(num_copies_)] = copy.tokens;
            ++num_copies_;
        }
        num_tokens_ += count;
        row_indptr_[at(r) + 1] = num_tokens_;
        row_branch_[at(r)] = branch;
        row_slot_[at(r)] = slot;
        row_length_[at(r)] = b.length;
        row_write_[at(r)] = write_slots_[at(num_tokens_ - 1)];
        if (decodes) b.row = r;
    }
    num_all_copies_ += num_copies_;
    if (table_width_ > 0) {
        lay_out_table();
    } else {
        levels_.build(row_branch_.data(), rows, row_indptr_.data());
        const LevelArrays& own = levels_.own();
        copy_ints(row_fill_.data(), own.last_page_len, rows);
        copy_ints(row_kv_.data(), own.kv_indptr, rows + 1);
    }
    copy_ints(row_indptr_out_.data(), row_indptr_.data(), rows + 1);
    copy_ints(row_slots_out_.data(), row_slot_.data(), rows);
    steady_ = num_queued_ == 0;
}

/// Fills the table's rows.
void Batch::lay_out_table() {
    const int32_t page_tokens = tree_.pool().page_tokens();
    longest_ = 0;
    for (int32_t r = 0; r < num_rows_; ++r) {
        longest_ = std::max(longest_, row_length_[at(r)]);
        const int32_t branch = row_branch_[at(r)];
        tree_.copy_pages(branch, table_.data() + at(r) * at(table_width_));
        row_pages_[at(r)] = (row_length_[at(r)] - 1) / page_tokens + 1;
        row_fill_[at(r)] = (row_length_[at(r)] - 1) % page_tokens + 1;
    }
    copy_ints(table_lengths_.data(), row_length_.data(), num_rows_);
}

}  // namespace branchline
