#include "branchline/batch.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace branchline {

namespace {
void copy_ints(int32_t* out, const int32_t* in, int32_t count) {
    std::memcpy(out, in, sizeof(int32_t) * static_cast<std::size_t>(count));
}

/// Moves `count` numbers up by `by` places. A call of memmove costs more than a few numbers do.
void move_up(int32_t* ids, int32_t count, int32_t by) {
    if (count > 12) {
        std::memmove(ids + by, ids, sizeof(int32_t) * static_cast<std::size_t>(count));
        return;
    }
    for (int32_t i = count - 1; i >= 0; --i) ids[i + by] = ids[i];
}

}  // namespace

Batch::Batch(Tree& tree, PrefixIndex& index, int32_t max_batch, int32_t max_step_tokens, int32_t level_cost_pages,
             int32_t table_width)
    : tree_(tree),
      index_(index),
      levels_(tree, max_batch, level_cost_pages),
      max_batch_(max_batch),
      max_step_tokens_(max_step_tokens),
      table_width_(table_width),
      members_(at(max_batch)),
      queue_(at(max_batch)),
      queued_tokens_(at(max_step_tokens)),
      slot_taken_(at(max_batch)),
      order_(at(max_batch)),
      entry_branch_(at(max_batch)),
      row_branch_(at(max_batch)),
      row_slot_(at(max_batch)),
      row_indptr_(at(max_batch) + 1),
      row_length_(at(max_batch)),
      row_write_(at(max_batch)),
      row_fill_(at(max_batch)),
      row_kv_(at(max_batch) + 1),
      row_pages_(at(max_batch)),
      crossing_(at(max_batch)),
      next_tokens_(at(max_batch)),
      token_ids_(at(max_step_tokens)),
      positions_(at(max_step_tokens)),
      write_slots_(at(max_step_tokens)),
      row_indptr_out_(at(max_batch) + 1),
      row_slots_out_(at(max_batch)),
      copy_src_(at(max_batch)),
      copy_dst_(at(max_batch)),
      copy_tokens_(at(max_batch)),
      table_(at(max_batch) * at(table_width), Residence::as_used),
      table_lengths_(at(max_batch)) {}

int32_t Batch::take_slot(int64_t slot) {
    if (slot < 0 || slot >= max_batch_) {
        throw BatchError("slot " + std::to_string(slot) + " is out of range: expected from 0 to max_batch - 1 = " +
                         std::to_string(max_batch_ - 1));
    }
    const auto taken = static_cast<int32_t>(slot);
    if (slot_taken_[at(taken)] != 0) throw BatchError("slot " + std::to_string(slot) + " is taken by another row");
    return taken;
}

void Batch::join(int32_t branch, int64_t slot, int32_t next_token) {
    Branch& b = tree_.branch(branch);
    if (b.member != kNone) throw BatchError("the branch is in the batch already");
    if (b.queued != kNone) throw BatchError("the branch has a prefill row queued: plan and commit it first");
    const int32_t taken = take_slot(slot);
    slot_taken_[at(taken)] = 1;
    next_tokens_[at(taken)] = next_token;
    b.member = num_members_;
    members_[at(num_members_++)] = Member{branch, taken};
    steady_ = false;
}

void Batch::prefill(int32_t branch, int64_t slot, const int32_t* tokens, int64_t count) {
    Branch& b = tree_.branch(branch);
    if (b.member != kNone) throw BatchError("the branch is in the batch as a decode row: it takes one token a step");
    if (b.queued != kNone) throw BatchError("the branch has a prefill row queued already");
    if (count < 1) throw BatchError("a prefill row needs at least one token");
    if (count > max_step_tokens_ - num_queued_tokens_) {
        throw BatchError("a prefill row of " + std::to_string(count) + " tokens: the queued rows have " +
                         std::to_string(num_queued_tokens_) + ", max_step_tokens is " + std::to_string(max_step_tokens_));
    }
    const int32_t taken = take_slot(slot);
    slot_taken_[at(taken)] = 1;
    const auto size = static_cast<int32_t>(count);
    copy_ints(queued_tokens_.data() + num_queued_tokens_, tokens, size);
    b.queued = num_queued_;
    queue_[at(num_queued_++)] = Queued{branch, taken, num_queued_tokens_, size};
    num_queued_tokens_ += size;
}

void Batch::leave(int32_t branch) {
    const Branch& b = tree_.branch(branch);
    if (b.member == kNone && b.queued == kNone) throw BatchError("the branch isn't in the batch");
    drop(branch);
}

void Batch::drop(int32_t branch) {
    Branch& b = tree_.branch(branch);
    if (b.member != kNone) {
        detach(branch);
        slot_taken_[at(members_[at(b.member)].slot)] = 0;
        const Member last = members_[at(--num_members_)];
        members_[at(b.member)] = last;
        tree_.branch(last.branch).member = b.member;
        b.member = kNone;
        steady_ = false;
    }
    if (b.queued != kNone) {
        const Queued gone = queue_[at(b.queued)];
        slot_taken_[at(gone.slot)] = 0;
        num_queued_tokens_ -= gone.count;
        int32_t* hole = queued_tokens_.data() + gone.first;
        std::memmove(hole, hole + gone.count, sizeof(int32_t) * at(num_queued_tokens_ - gone.first));
        --num_queued_;
        for (int32_t q = b.queued; q < num_queued_; ++q) {
            Queued& moved = queue_[at(q)];
            moved = queue_[at(q + 1)];
            moved.first -= gone.count;
            tree_.branch(moved.branch).queued = q;
        }
        b.queued = kNone;
    }
}

void Batch::sync_all() const {
    for (int32_t m = 0; m < num_members_; ++m) sync(members_[at(m)].branch);
}

void Batch::detach(int32_t branch) {
    Branch& b = tree_.branch(branch);
    if (b.row == kNone) return;
    sync(branch);
    row_branch_[at(b.row)] = kNone;
    b.row = kNone;
    steady_ = false;
}

void Batch::forget_layout() {
    for (int32_t m = 0; m < num_members_; ++m) {
        const int32_t branch = members_[at(m)].branch;
        sync(branch);
        tree_.branch(branch).row = kNone;
    }
    steady_ = false;
}

void Batch::require_pages(int64_t need, const char* who) {
    const PagePool& pool = tree_.pool();
    if (need <= pool.num_free()) [[likely]] return;
    const int64_t missing = need - pool.num_free();
    const int32_t cached = index_.count_evictable();
    if (missing <= cached) {
        num_evicted_pages_ += index_.evict(static_cast<int32_t>(missing));
        if (need <= pool.num_free()) return;
    }
    std::string text = std::string(who) + " needs " + std::to_string(need) + " pages, " + std::to_string(pool.num_free()) + " of " +
                       std::to_string(pool.num_pages()) + " are free";
    if (cached > 0) text += " and " + std::to_string(cached) + " cached ones could be evicted";
    if (pool.num_used() > 0) text += "; " + std::to_string(pool.num_used()) + " wait to be zeroed: call take_used()";
    throw OutOfPagesError(text + ": release branches, or take rows out of the batch");
}

void Batch::require_width(int64_t length) const {
    const int64_t most = static_cast<int64_t>(table_width_) * tree_.pool().page_tokens();
    if (length > most) [[unlikely]] {
        throw BatchError("a row of " + std::to_string(length) + " tokens: a table of " + std::to_string(table_width_) +
                         " pages a row holds " + std::to_string(most));
    }
}

int32_t Batch::plan() {
    const int64_t tokens = static_cast<int64_t>(num_members_) + num_queued_tokens_;
    if (tokens > max_step_tokens_) {
        throw BatchError("the step has " + std::to_string(tokens) + " tokens (" + std::to_string(num_members_) + " decode rows and " +
                         std::to_string(num_queued_tokens_) + " prefill tokens), max_step_tokens is " +
                         std::to_string(max_step_tokens_) + ": take rows out with leave()");
    }
    if (steady_ && num_queued_ == 0) {
        advance();
    } else {
        lay_out();
    }
    planned_ = true;
    num_steps_ += 1;
    num_step_tokens_ += num_tokens_;
    return num_tokens_;
}

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

void Batch::clear_queue() {
    for (int32_t q = 0; q < num_queued_; ++q) {
        tree_.branch(queue_[at(q)].branch).queued = kNone;
        slot_taken_[at(queue_[at(q)].slot)] = 0;
    }
    num_queued_ = 0;
    num_queued_tokens_ = 0;
}

void Batch::commit() {
    planned_ = false;
    if (num_queued_ > 0) {
        forget_layout();
        clear_queue();
    }
}

void Batch::rollback() {
    planned_ = false;
    forget_layout();
    for (int32_t r = num_rows_ - 1; r >= 0; --r) {
        tree_.unappend(row_branch_[at(r)], row_indptr_[at(r) + 1] - row_indptr_[at(r)]);
    }
    clear_queue();
}

void Batch::check() const {
    const auto require = [](bool ok, const char* what) {
        if (!ok) throw CoreError(std::string("invariant broken: ") + what);
    };
    int32_t slots = 0;
    for (int32_t s = 0; s < max_batch_; ++s) slots += slot_taken_[at(s)];
    require(slots == num_members_ + num_queued_, "taken slots and rows don't add up");
    for (int32_t m = 0; m < num_members_; ++m) {
        const Branch& b = tree_.branch(members_[at(m)].branch);
        require((b.generation & 1u) != 0 && b.member == m, "a decode row's branch doesn't know its row");
        require(slot_taken_[at(members_[at(m)].slot)] != 0, "a decode row's slot is free");
        require(b.row == kNone || row_branch_[at(b.row)] == members_[at(m)].branch, "a layout row belongs to another branch");
    }
    for (int32_t q = 0; q < num_queued_; ++q) {
        const Branch& b = tree_.branch(queue_[at(q)].branch);
        require((b.generation & 1u) != 0 && b.queued == q, "a prefill row's branch doesn't know its row");
        require(slot_taken_[at(queue_[at(q)].slot)] != 0, "a prefill row's slot is free");
    }
    int32_t members = 0;
    int32_t queued = 0;
    int32_t placed = 0;
    for (int32_t i = 0; i < tree_.max_branches(); ++i) {
        const Branch& b = tree_.branch(i);
        members += b.member != kNone ? 1 : 0;
        queued += b.queued != kNone ? 1 : 0;
        placed += b.row != kNone ? 1 : 0;
        require(b.row == kNone || b.member != kNone, "a branch that doesn't decode has a row");
    }
    require(members == num_members_ && queued == num_queued_, "branches in the batch are miscounted");
    require(!steady_ || (placed == num_members_ && num_rows_ == num_members_), "a steady batch lacks rows");
}

}  // namespace branchline
