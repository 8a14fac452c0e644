#include "random_walk.hpp"

#include <algorithm>

#include "expect.hpp"

namespace branchline::test {

namespace {

TreeSizes draw_sizes(std::mt19937_64& random) {
    const auto draw = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
    TreeSizes sizes{};
    sizes.num_pages = draw(1, 120);
    sizes.page_tokens = draw(1, 16);
    sizes.max_branches = draw(1, 20);
    sizes.max_batch = draw(1, 10);
    sizes.max_step_tokens = draw(1, 60);
    sizes.max_levels = draw(1, 4);
    sizes.level_cost_pages = draw(0, 8);
    sizes.table_width = sizes.max_levels == 1 && draw(0, 1) == 1 ? sizes.num_pages : 0;
    sizes.zero_used = draw(0, 3) == 0;
    return sizes;
}

uint64_t extend(uint64_t history, int32_t token) {
    return (history ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull + 1;
}

}  // namespace

RandomWalk::RandomWalk(uint64_t seed)
    : random_(seed),
      sizes_(draw_sizes(random_)),
      tree_(sizes_),
      vocabulary_(draw(0, 1) == 0 ? 2 : 1000),
      written_(static_cast<std::size_t>(sizes_.num_pages * sizes_.page_tokens)) {}

std::vector<int32_t> RandomWalk::words(int32_t most) {
    std::vector<int32_t> out(static_cast<std::size_t>(draw(1, most)));
    for (int32_t& word : out) word = draw(0, vocabulary_ - 1);
    return out;
}

bool RandomWalk::fits(int64_t branches) const {
    return static_cast<int64_t>(live_.size()) + branches <= sizes_.max_branches;
}

void RandomWalk::operate() {
    const int32_t kind = live_.empty() ? 0 : draw(0, 99);
    if (kind < 5) {
        const int32_t tenant = draw(0, 2);
        if (fits(1)) {
            live_.push_back(Live{tree_.root(tenant), {}, tenant, kNone, {}});
        } else {
            EXPECT_THROWS(OutOfBranchesError, tree_.root(tenant));
        }
    } else if (kind < 18) {
        fork();
    } else if (kind < 28) {
        release();
    } else if (kind < 31) {
        truncate();
    } else if (kind < 48) {
        join();
    } else if (kind < 52) {
        Live& branch = any();
        if (branch.slot == kNone && branch.queued.empty()) {
            EXPECT_THROWS(BatchError, tree_.leave(branch.handle));
        } else {
            tree_.leave(branch.handle);
            branch.slot = kNone;
            branch.queued.clear();
        }
    } else if (kind < 62) {
        prefill();
    } else if (kind < 84) {
        step(true);
    } else if (kind < 86) {
        step(false);
    } else if (kind < 89) {
        lend();
    } else if (kind < 93) {
        match();
    } else if (kind < 96) {
        Live& branch = any();
        EXPECT(tree_.insert(branch.handle) <= static_cast<int32_t>(branch.tokens.size()));
    } else if (kind < 97) {
        switch (draw(0, 3)) {
            case 0: tree_.evict(draw(0, 10)); break;
            case 1: release_private(); break;
            default: swap();
        }
    } else if (kind < 99) {
        tree_.take_used();
    } else {
        for (const Handle handle : stale_) EXPECT_THROWS(ReleasedHandleError, tree_.fork(handle));
    }
}

void RandomWalk::fork() {
    const Live parent = any();
    const int32_t count = draw(0, 3);
    std::vector<Handle> made(static_cast<std::size_t>(count));
    if (!fits(count)) {
        EXPECT_THROWS(OutOfBranchesError, tree_.fork_many(parent.handle, count, made.data()));
        return;
    }
    const int32_t free = tree_.tree().pool().num_free();
    tree_.fork_many(parent.handle, count, made.data());
    EXPECT(tree_.tree().pool().num_free() == free);
    for (const Handle handle : made) live_.push_back(Live{handle, parent.tokens, parent.tenant, kNone, {}});
}

void RandomWalk::release() {
    std::vector<Handle> handles;
    const int32_t count = draw(0, std::min(3, static_cast<int32_t>(live_.size())));
    std::shuffle(live_.begin(), live_.end(), random_);
    for (int32_t i = 0; i < count; ++i) handles.push_back(live_[static_cast<std::size_t>(i)].handle);
    if (count > 0 && draw(0, 4) == 0) {
        handles.push_back(handles.front());
        EXPECT_THROWS(ReleasedHandleError, tree_.release_many(handles.data(), static_cast<int64_t>(handles.size())));
        return;
    }
    if (count == 1) {
        tree_.release(handles.front());
    } else {
        tree_.release_many(handles.data(), count);
    }
    live_.erase(live_.begin(), live_.begin() + count);
    stale_.insert(stale_.end(), handles.begin(), handles.end());
    if (stale_.size() > 20) stale_.erase(stale_.begin(), stale_.end() - 20);
}

void RandomWalk::truncate() {
    Live& branch = any();
    const int32_t shared = tree_.shared_length(branch.handle);
    const auto length = static_cast<int32_t>(branch.tokens.size());
    const int32_t to = draw(-1, length + 1);
    if (to < shared || to > length) {
        EXPECT_THROWS(std::invalid_argument, tree_.truncate(branch.handle, to));
    } else {
        tree_.truncate(branch.handle, to);
        branch.tokens.resize(static_cast<std::size_t>(to));
    }
}

void RandomWalk::join() {
    Live& branch = any();
    const int32_t slot = draw(-1, static_cast<int32_t>(sizes_.max_batch));
    bool refused = slot < 0 || slot >= sizes_.max_batch || branch.slot != kNone || !branch.queued.empty();
    const int32_t token = draw(0, vocabulary_ - 1);
    try {
        tree_.join(branch.handle, slot, token);
        EXPECT(!refused);
        branch.slot = slot;
    } catch (const BatchError&) {  // or the slot is taken
    }
}

void RandomWalk::prefill() {
    Live& branch = any();
    const std::vector<int32_t> tokens = words(20);
    try {
        tree_.prefill(branch.handle, draw(0, static_cast<int32_t>(sizes_.max_batch) - 1), tokens.data(),
                      static_cast<int64_t>(tokens.size()));
        EXPECT(branch.slot == kNone && branch.queued.empty());
        branch.queued = tokens;
    } catch (const BatchError&) {  // the slot is taken, the branch is in, or the rows are too many
    }
}

/// For each row the slots that it reads, in order.
std::vector<std::vector<int32_t>> RandomWalk::reads() {
    Batch& batch = tree_.batch();
    const int32_t page_tokens = tree_.tree().pool().page_tokens();
    std::vector<std::vector<int32_t>> out(static_cast<std::size_t>(batch.num_rows()));
    const auto add = [&](std::vector<int32_t>& row, int32_t page, int32_t tokens) {
        EXPECT(page >= 0 && page < sizes_.num_pages);
        for (int32_t t = 0; t < tokens; ++t) row.push_back(page * page_tokens + t);
    };
    for (int32_t l = 0; l < batch.num_levels(); ++l) {
        const LevelArrays& level = tree_.level(l);
        EXPECT(level.qo_indptr[level.num_groups] == batch.num_tokens() || level.num_groups == 0);
        int32_t row = 0;
        for (int32_t g = 0; g < level.num_groups; ++g) {
            EXPECT(batch.row_indptr()[row] == level.qo_indptr[g]);
            for (; batch.row_indptr()[row] < level.qo_indptr[g + 1]; ++row) {
                for (int32_t i = level.kv_indptr[g]; i < level.kv_indptr[g + 1]; ++i) {
                    const bool last = i + 1 == level.kv_indptr[g + 1];
                    add(out[static_cast<std::size_t>(row)], level.kv_indices[i], last ? level.last_page_len[g] : page_tokens);
                }
            }
        }
        EXPECT(row == batch.num_rows() || level.num_groups == 0);
    }
    for (int32_t r = 0; r < batch.num_rows() && batch.num_levels() == 0; ++r) {
        const int32_t length = batch.table_lengths()[r];
        for (int32_t t = 0; t < length; t += page_tokens) {
            add(out[static_cast<std::size_t>(r)], batch.table()[r * batch.table_width() + t / page_tokens],
                std::min(page_tokens, length - t));
        }
    }
    return out;
}

void RandomWalk::step(bool commit) {
    Batch& batch = tree_.batch();
    for (int64_t s = 0; s < sizes_.max_batch; ++s) batch.next_tokens()[s] = draw(0, vocabulary_ - 1);
    try {
        tree_.plan();
    } catch (const OutOfPagesError&) {
        return;
    } catch (const BatchError&) {
        return;
    }
    const auto at = [](int32_t i) { return static_cast<std::size_t>(i); };
    const int32_t page_tokens = tree_.tree().pool().page_tokens();
    for (int32_t c = 0; c < batch.num_copies(); ++c) {
        for (int32_t t = 0; t < batch.copy_tokens()[c]; ++t) {
            written_[at(batch.copy_dst()[c] * page_tokens + t)] = written_[at(batch.copy_src()[c] * page_tokens + t)];
        }
    }
    const std::vector<std::vector<int32_t>> rows = reads();
    std::vector<std::vector<int32_t>> after;  // tokens of each row's branch
    std::vector<Live*> branches;
    for (int32_t r = 0; r < batch.num_rows(); ++r) {
        // Decode rows are known by their slots; a prefill row by its tokens' place, for its slot isn't kept here.
        Live* found = nullptr;
        const int32_t first = batch.row_indptr()[r];
        const int32_t count = batch.row_indptr()[r + 1] - first;
        for (Live& branch : live_) {
            if (branch.slot == batch.row_slots()[r]) found = &branch;
        }
        if (found == nullptr) {
            for (Live& branch : live_) {
                const bool taken = std::find(branches.begin(), branches.end(), &branch) != branches.end();
                if (taken || branch.queued.size() != at(count) || branch.tokens.size() != at(batch.positions()[first])) continue;
                if (!std::equal(branch.queued.begin(), branch.queued.end(), batch.token_ids() + first)) continue;
                // Equal rows of equal branches are told apart by what they read.
                uint64_t history = 0;
                bool same = true;
                for (std::size_t t = 0; t < branch.tokens.size() && same; ++t) {
                    history = extend(history, branch.tokens[t]);
                    same = written_[at(rows[at(r)][t])] == history;
                }
                if (same) found = &branch;
            }
        }
        EXPECT(found != nullptr);
        branches.push_back(found);
        std::vector<int32_t> tokens = found->tokens;
        for (int32_t t = first; t < first + count; ++t) {
            EXPECT(batch.positions()[t] == static_cast<int32_t>(tokens.size()));
            EXPECT(batch.write_slots()[t] == rows[at(r)][tokens.size()]);
            tokens.push_back(batch.token_ids()[t]);
        }
        EXPECT(rows[at(r)].size() == tokens.size());
        uint64_t history = 0;
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            history = extend(history, tokens[t]);
            if (t >= found->tokens.size()) written_[at(rows[at(r)][t])] = history;
        }
        after.push_back(std::move(tokens));
    }
    for (int32_t r = 0; r < batch.num_rows(); ++r) {  // once all is written, each row still reads its own history
        uint64_t history = 0;
        for (std::size_t t = 0; t < after[at(r)].size(); ++t) {
            history = extend(history, after[at(r)][t]);
            EXPECT(written_[at(rows[at(r)][t])] == history);
        }
    }
    if (commit) {
        tree_.commit();
        for (std::size_t r = 0; r < branches.size(); ++r) branches[r]->tokens = after[r];
    } else {
        tree_.rollback();
    }
    for (Live& branch : live_) branch.queued.clear();
}

void RandomWalk::lend() {
    if (!leases_.empty() && draw(0, 1) == 0) {
        tree_.give_back(leases_.data(), static_cast<int64_t>(leases_.size()));
        EXPECT_THROWS(ReleasedHandleError, tree_.give_back(leases_.data(), 1));
        leases_.clear();
        return;
    }
    try {
        const int32_t pages = draw(0, 3) == 0 ? draw(0, 70) : draw(0, 20);
        const Handle lease = tree_.lend(pages, draw(0, 2));
        EXPECT(tree_.leased_pages(lease).size() == static_cast<std::size_t>(pages));
        leases_.push_back(lease);
    } catch (const OutOfPagesError&) {
    } catch (const OutOfBranchesError&) {
    }
}

void RandomWalk::match() {
    const Live& like = any();
    std::vector<int32_t> tokens(like.tokens.begin(), like.tokens.begin() + draw(0, static_cast<int32_t>(like.tokens.size())));
    const std::vector<int32_t> others = words(10);
    tokens.insert(tokens.end(), others.begin(), others.end());
    const int32_t tenant = draw(0, 2);
    if (!fits(1)) {
        EXPECT_THROWS(OutOfBranchesError, tree_.match(tokens.data(), static_cast<int64_t>(tokens.size()), tenant));
        return;
    }
    const Found peeked = tree_.peek(tokens.data(), static_cast<int64_t>(tokens.size()), tenant);
    const int32_t idle = tree_.tree().idle_pages();
    const Handle handle = tree_.match(tokens.data(), static_cast<int64_t>(tokens.size()), tenant);
    EXPECT(tree_.length(handle) == peeked.tokens && idle - tree_.tree().idle_pages() == peeked.idle_pages);
    const auto rest = static_cast<std::size_t>(peeked.tokens);
    const Graft graft = tree_.graft(handle, tokens.data() + rest, static_cast<int64_t>(tokens.size() - rest));
    EXPECT(graft.tokens >= 0 && graft.tokens < std::max<int64_t>(sizes_.page_tokens, 2));
    for (int32_t t = 0; t < graft.tokens; ++t) {
        written_[static_cast<std::size_t>(graft.dst * sizes_.page_tokens + t)] =
            written_[static_cast<std::size_t>(graft.src * sizes_.page_tokens + t)];
    }
    const std::vector<int32_t> found = tree_.tokens(handle);
    EXPECT(found.size() == rest + static_cast<std::size_t>(graft.tokens));
    EXPECT(found.size() <= tokens.size() && std::equal(found.begin(), found.end(), tokens.begin()));
    live_.push_back(Live{handle, found, tenant, kNone, {}});
}

/// Takes a branch's tail off and puts it back on other pages.
void RandomWalk::swap() {
    Live& branch = any();
    const int32_t shared = tree_.shared_length(branch.handle);
    const std::vector<int32_t> tail(branch.tokens.begin() + shared, branch.tokens.end());
    if (branch.slot != kNone || !branch.queued.empty()) {
        EXPECT_THROWS(BatchError, tree_.extend(branch.handle, tail.data(), static_cast<int64_t>(tail.size())));
        return;
    }
    const std::vector<int32_t> all = tree_.pages(branch.handle);
    const auto private_pages = static_cast<std::size_t>(tree_.describe(branch.handle).private_pages);
    std::vector<uint64_t> kept;
    for (std::size_t p = all.size() - private_pages; p < all.size(); ++p) {
        const auto first = written_.begin() + all[p] * sizes_.page_tokens;
        kept.insert(kept.end(), first, first + sizes_.page_tokens);
    }
    tree_.truncate(branch.handle, shared);
    branch.tokens.resize(static_cast<std::size_t>(shared));
    try {
        const std::vector<int32_t> pages = tree_.extend(branch.handle, tail.data(), static_cast<int64_t>(tail.size()));
        EXPECT(pages.size() == private_pages);
        for (std::size_t p = 0; p < pages.size(); ++p) {
            std::copy_n(kept.begin() + static_cast<int64_t>(p) * sizes_.page_tokens, sizes_.page_tokens,
                        written_.begin() + pages[p] * sizes_.page_tokens);
        }
        branch.tokens.insert(branch.tokens.end(), tail.begin(), tail.end());
    } catch (const OutOfPagesError&) {
        EXPECT(sizes_.zero_used);
    }
}

/// What a branch's release gives is what it said before.
void RandomWalk::release_private() {
    Live& branch = any();
    const auto [pages, tokens] = tree_.private_part(branch.handle);
    EXPECT(tokens <= static_cast<int32_t>(branch.tokens.size()));
    const auto spare = [&] {
        return tree_.tree().pool().num_free() + tree_.tree().pool().num_used() + tree_.tree().idle_pages();
    };
    const int32_t before = spare();
    tree_.release(branch.handle);
    EXPECT(spare() - before == pages);
    live_.erase(live_.begin() + (&branch - live_.data()));
}

void RandomWalk::verify() {
    tree_.check();
    EXPECT(tree_.tree().num_branches() == static_cast<int32_t>(live_.size()));
    for (const Live& branch : live_) {
        EXPECT(tree_.tokens(branch.handle) == branch.tokens);
        const std::vector<int32_t> pages = tree_.pages(branch.handle);
        EXPECT(std::vector<int32_t>(pages).size() >= (branch.tokens.size() + static_cast<std::size_t>(sizes_.page_tokens) - 1) /
                                                         static_cast<std::size_t>(sizes_.page_tokens));
    }
}

void RandomWalk::finish() {
    std::vector<Handle> handles;
    for (const Live& branch : live_) handles.push_back(branch.handle);
    tree_.release_many(handles.data(), static_cast<int64_t>(handles.size()));
    tree_.give_back(leases_.data(), static_cast<int64_t>(leases_.size()));
    tree_.evict(sizes_.num_pages);
    tree_.take_used();
    live_.clear();
    leases_.clear();
    verify();
    EXPECT(tree_.tree().pool().num_free() == sizes_.num_pages);
    EXPECT(tree_.tree().num_segments() == 0);
}

}  // namespace branchline::test
