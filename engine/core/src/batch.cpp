#include "branchline/batch.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace branchline {

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
