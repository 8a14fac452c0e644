// Verification of every invariant of a Tree. Allocates; not for a hot path.

#include <string>
#include <vector>

#include "branchline/tree.hpp"

namespace branchline {

namespace {

[[noreturn]] void fail(const std::string& what) { throw CoreError("invariant broken: " + what); }

void require(bool ok, const char* what) {
    if (!ok) fail(what);
}

/// Says who it was; the text is put together only if it is needed, so that a check stays cheap.
void require(bool ok, const char* kind, int64_t i, const char* what) {
    if (!ok) fail(std::string(kind) + " " + std::to_string(i) + " " + what);
}

/// Marks pages and chunks by owner; each may be marked once.
class Ownership {
  public:
    explicit Ownership(const PagePool& pool)
        : pool_(pool), pages_(static_cast<std::size_t>(pool.num_pages())), chunks_(static_cast<std::size_t>(pool.num_chunks())) {}

    void page(int32_t page) { mark(pages_, page, "page"); }
    void chunk(int32_t chunk) { mark(chunks_, chunk, "chunk"); }

    void list(const PageList& list, const char* kind, int64_t owner) {
        require(list.count >= 0 && list.count <= pool_.num_pages(), kind, owner, "has an impossible number of pages");
        if (list.in_chunks()) {
            int32_t next = list.first_chunk();
            for (int32_t rest = list.count; rest > 0; rest -= PagePool::kChunk) {
                chunk(next);
                require(rest > PagePool::kChunk || next == list.last_chunk(), kind, owner, "misremembers its last chunk");
                next = pool_.next_chunk(next);
            }
        }
        pool_.for_each(list, [&](int32_t, int32_t p) {
            page(p);
            return true;
        });
    }

    void require_complete() const {
        for (std::size_t i = 0; i < pages_.size(); ++i) require(pages_[i] != 0, "page", static_cast<int64_t>(i), "has no owner");
        for (std::size_t i = 0; i < chunks_.size(); ++i) require(chunks_[i] != 0, "chunk", static_cast<int64_t>(i), "has no owner");
    }

  private:
    static void mark(std::vector<char>& marks, int32_t i, const char* kind) {
        require(i >= 0 && static_cast<std::size_t>(i) < marks.size(), kind, i, "doesn't exist but is owned");
        char& m = marks[static_cast<std::size_t>(i)];
        require(m == 0, kind, i, "has two owners");
        m = 1;
    }

    const PagePool& pool_;
    std::vector<char> pages_;
    std::vector<char> chunks_;
};

}  // namespace

void Tree::check(const std::vector<std::pair<const PageList*, int32_t>>& lent) const {
    const int32_t page_tokens = pool_.page_tokens();
    Ownership ownership(pool_);
    int32_t num_free = 0;
    pool_.for_each_free([&](int32_t page) {
        ownership.page(page);
        ++num_free;
    });
    require(num_free == pool_.num_free(), "free pages are miscounted");
    for (int32_t i = 0; i < pool_.num_used(); ++i) ownership.page(pool_.used_pages()[i]);
    for (int32_t i = 0; i < pool_.num_free_chunks(); ++i) ownership.chunk(pool_.free_chunk(i));
    std::vector<int32_t> of_tenant(index(kTenants));
    for (const auto& [pages, tenant] : lent) {
        ownership.list(*pages, "a lease of tenant", tenant);
        of_tenant[index(tenant)] += pages->count;
    }

    std::vector<char> is_free(segments_.size());
    for (int32_t i = 0; i < num_free_segments_; ++i) {
        char& f = is_free[index(free_segments_[index(i)])];
        require(f == 0, "segment", free_segments_[index(i)], "is free twice");
        f = 1;
    }
    require(num_free_segments_ + num_segments_ == max_segments(), "free and used segments don't add up");

    std::vector<int32_t> holders(segments_.size());
    std::vector<int32_t> idle_children(segments_.size());
    int32_t idle_pages = 0;
    std::vector<int32_t> idle_of_tenant(index(kTenants));
    const auto check_run = [&](const char* kind, int32_t i, const PageList& pages, int32_t parent, int32_t lead, int32_t start,
                               int32_t end) {
        const int32_t own = end - start;
        require(own >= 0, kind, i, "has a negative length");
        int32_t expected_lead = 0;
        if (parent == kNone) {
            require(start == 0, kind, i, "has no parent but doesn't start at 0");
        } else {
            require(parent >= 0 && parent < max_segments() && is_free[index(parent)] == 0, kind, i, "goes on from a free segment");
            const Segment& above = segments_[index(parent)];
            require(above.end == start, kind, i, "doesn't start where its parent ends");
            ++holders[index(parent)];
            if (own > 0 && above.boundary == Boundary::copied) expected_lead = stored(above) % page_tokens;
        }
        require(lead == expected_lead, kind, i, "has a wrong lead");
        ownership.list(pages, kind, i);
        require(pages.count == (own == 0 ? 0 : (lead + own + page_tokens - 1) / page_tokens), kind, i,
                "has pages that don't fit its tokens");
    };

    for (int32_t i = 0; i < max_segments(); ++i) {
        if (is_free[index(i)] != 0) continue;
        const Segment& segment = segments_[index(i)];
        require(segment.end > segment.start, "segment", i, "is empty");
        check_run("segment", i, segment.pages, segment.parent, segment.lead, segment.start, segment.end);
        of_tenant[segment.tenant] += segment.pages.count;
        holders[index(i)] += segment.indexed;
        if (is_idle(segment)) {
            idle_pages += segment.pages.count;
            idle_of_tenant[segment.tenant] += segment.pages.count;
            if (segment.parent != kNone) ++idle_children[index(segment.parent)];
        }
        int32_t hard = 0;
        if (segment.parent != kNone) {
            const Segment& above = segments_[index(segment.parent)];
            hard = above.hard_above + (above.boundary == Boundary::hard ? 1 : 0);
        }
        require(segment.hard_above == hard && hard < max_levels_, "segment", i, "miscounts its hard boundaries");
        require((segment.boundary == Boundary::aligned) == (stored(segment) % page_tokens == 0), "segment", i, "has a wrong boundary");
    }

    int32_t live = 0;
    for (int32_t i = 0; i < max_branches(); ++i) {
        const Branch& branch = branches_[index(i)];
        if ((branch.generation & 1u) == 0) {
            require(tails_[index(i)].count == 0 && branch.lead == 0 && branch.member == kNone && branch.queued == kNone &&
                        branch.row == kNone,
                    "free branch", i, "holds something");
            continue;
        }
        ++live;
        of_tenant[branch.tenant] += tails_[index(i)].count;
        check_run("branch", i, tails_[index(i)], branch.parent, branch.lead, branch.start, branch.length);
    }
    require(live == num_branches_, "live branches are miscounted");
    for (int32_t i = 0; i < num_free_branches_; ++i) {
        const int32_t b = free_branches_[index(i)];
        require((branches_[index(b)].generation & 1u) == 0, "branch", b, "lives but is free");
    }
    for (int32_t i = 0; i < max_segments(); ++i) {
        if (is_free[index(i)] == 0) {
            require(segments_[index(i)].refs == holders[index(i)], "segment", i, "has a count that isn't that of its holders");
            require(segments_[index(i)].idle_children == idle_children[index(i)], "segment", i, "miscounts its idle children");
        }
    }
    require(idle_pages == idle_pages_, "idle pages are miscounted");
    ownership.require_complete();
    for (int32_t t = 0; t < kTenants; ++t) {
        require(of_tenant[index(t)] == tenant_pages_[index(t)], "tenant", t, "has a wrong count of pages");
        require(idle_of_tenant[index(t)] == tenant_idle_pages_[index(t)], "tenant", t, "has a wrong count of idle pages");
    }
}

}  // namespace branchline
