// Verification of every invariant of a Tree. Allocates; not for a hot path.

#include <string>
#include <vector>

#include "branchline/tree.hpp"

namespace branchline {

namespace {

void require(bool ok, const std::string& what) {
    if (!ok) throw CoreError("invariant broken: " + what);
}

/// Marks pages and chunks by owner; each may be marked once.
class Ownership {
  public:
    explicit Ownership(const PagePool& pool)
        : pool_(pool), pages_(static_cast<std::size_t>(pool.num_pages())), chunks_(static_cast<std::size_t>(pool.num_chunks())) {}

    void page(int32_t page, const std::string& owner) { mark(pages_, page, "page", owner); }
    void chunk(int32_t chunk, const std::string& owner) { mark(chunks_, chunk, "chunk", owner); }

    void list(const PageList& list, const std::string& owner) {
        require(list.count >= 0 && list.count <= pool_.num_pages(), owner + " has a list of " + std::to_string(list.count) + " pages");
        int32_t last = kNone;
        pool_.for_each(list, [&](int32_t, int32_t p) { page(p, owner); last = p; });
        require(list.count == 0 || last == list.last_page, owner + " misremembers its last page");
        int32_t chunk_index = list.first_chunk;
        for (int32_t rest = list.count - PageList::kInline; rest > 0; rest -= PagePool::kChunk) {
            chunk(chunk_index, owner);
            if (rest <= PagePool::kChunk) require(chunk_index == list.last_chunk, owner + " misremembers its last chunk");
            chunk_index = pool_.next_chunk(chunk_index);
        }
    }

    void require_complete() const {
        for (std::size_t i = 0; i < pages_.size(); ++i) require(pages_[i] != 0, "page " + std::to_string(i) + " has no owner");
        for (std::size_t i = 0; i < chunks_.size(); ++i) require(chunks_[i] != 0, "chunk " + std::to_string(i) + " has no owner");
    }

  private:
    static void mark(std::vector<char>& marks, int32_t i, const char* kind, const std::string& owner) {
        require(i >= 0 && static_cast<std::size_t>(i) < marks.size(), owner + " has " + kind + " " + std::to_string(i));
        char& m = marks[static_cast<std::size_t>(i)];
        require(m == 0, std::string(kind) + " " + std::to_string(i) + " of " + owner + " has another owner too");
        m = 1;
    }

    const PagePool& pool_;
    std::vector<char> pages_;
    std::vector<char> chunks_;
};

}  // namespace

void Tree::check() const {
    const int32_t page_tokens = pool_.page_tokens();
    Ownership ownership(pool_);
    for (int32_t i = 0; i < pool_.num_free(); ++i) ownership.page(pool_.free_pages()[i], "the free stack");
    for (int32_t i = 0; i < pool_.num_free_chunks(); ++i) ownership.chunk(pool_.free_chunks()[i], "the free chunks");

    std::vector<char> is_free(segments_.size());
    for (int32_t i = 0; i < num_free_segments_; ++i) {
        char& f = is_free[index(free_segments_[index(i)])];
        require(f == 0, "a segment is free twice");
        f = 1;
    }
    require(num_free_segments_ + num_segments_ == max_segments(), "free and used segments don't add up");

    std::vector<int32_t> holders(segments_.size());
    const auto hold = [&](int32_t parent, int32_t start, const std::string& who) {
        if (parent == kNone) {
            require(start == 0, who + " has no parent but starts at " + std::to_string(start));
            return;
        }
        require(parent >= 0 && parent < max_segments() && !is_free[index(parent)], who + " goes on from a free segment");
        require(segments_[index(parent)].end == start, who + " doesn't start where its parent ends");
        ++holders[index(parent)];
    };
    const auto check_run = [&](const PageList& pages, int32_t parent, int32_t lead, int32_t start, int32_t end,
                               const std::string& who) {
        ownership.list(pages, who);
        const int32_t own = end - start;
        require(own >= 0, who + " has a negative length");
        const int32_t expected = own == 0 ? 0 : (lead + own + page_tokens - 1) / page_tokens;
        require(pages.count == expected, who + " has " + std::to_string(pages.count) + " pages, expected " + std::to_string(expected));
        int32_t expected_lead = 0;
        if (own > 0 && parent != kNone && segments_[index(parent)].boundary == Boundary::copied) {
            expected_lead = stored(segments_[index(parent)]) % page_tokens;
        }
        require(lead == expected_lead, who + " has lead " + std::to_string(lead) + ", expected " + std::to_string(expected_lead));
    };

    for (int32_t i = 0; i < max_segments(); ++i) {
        if (is_free[index(i)]) continue;
        const Segment& segment = segments_[index(i)];
        const std::string who = "segment " + std::to_string(i);
        hold(segment.parent, segment.start, who);
        require(segment.end > segment.start, who + " is empty");
        check_run(segment.pages, segment.parent, segment.lead, segment.start, segment.end, who);
        int32_t hard = 0;
        int32_t depth = 1;
        if (segment.parent != kNone) {
            const Segment& above = segments_[index(segment.parent)];
            hard = above.hard_above + (above.boundary == Boundary::hard ? 1 : 0);
            depth = above.depth + 1;
        }
        require(segment.hard_above == hard && hard < max_levels_, who + " miscounts its hard boundaries");
        require(segment.depth == depth, who + " miscounts its depth");
        require((segment.boundary == Boundary::aligned) == (stored(segment) % page_tokens == 0), who + " has a wrong boundary");
    }

    int32_t live = 0;
    for (int32_t i = 0; i < max_branches(); ++i) {
        const Branch& branch = branches_[index(i)];
        const std::string who = "branch " + std::to_string(i);
        if ((branch.generation & 1u) == 0) {
            require(tails_[index(i)].count == 0 && branch.lead == 0 && branch.parent == kNone, who + " is free but holds something");
            continue;
        }
        ++live;
        hold(branch.parent, branch.start, who);
        check_run(tails_[index(i)], branch.parent, branch.lead, branch.start, branch.length, who);
    }
    require(live == num_branches_, "live branches are miscounted");
    for (int32_t i = 0; i < num_free_branches_; ++i) {
        require((branches_[index(free_branches_[index(i)])].generation & 1u) == 0, "a live branch is among the free");
    }
    for (int32_t i = 0; i < max_segments(); ++i) {
        if (is_free[index(i)]) continue;
        require(segments_[index(i)].refs == holders[index(i)], "segment " + std::to_string(i) + " counts " +
                std::to_string(segments_[index(i)].refs) + " holders, has " + std::to_string(holders[index(i)]));
    }
    ownership.require_complete();
}

}  // namespace branchline
