#include "branchline/tree.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace branchline {

namespace {

int32_t pages_for(int32_t tokens, int32_t page_tokens) { return (tokens + page_tokens - 1) / page_tokens; }

}  // namespace

uint32_t Tree::draw_generation() {
    static std::atomic<uint32_t> tables{0};
    return (tables.fetch_add(1, std::memory_order_relaxed) * 0x9E3779B1u) & ~1u;
}

Tree::Tree(int32_t num_pages, int32_t page_tokens, int32_t max_branches, int32_t max_levels, bool keep_used)
    : pool_(num_pages, page_tokens, keep_used),
      max_levels_(max_levels),
      num_free_branches_(max_branches),
      num_free_segments_(num_pages),  // a segment has at least one page
      first_generation_(draw_generation()),
      branches_(index(max_branches)),
      tails_(index(max_branches)),
      segments_(index(num_pages)),
      free_branches_(index(max_branches)),
      free_segments_(index(num_pages)),
      tenant_pages_(index(kTenants)),
      tenant_idle_pages_(index(kTenants)) {
    for (int32_t i = 0; i < max_branches; ++i) {
        branches_[index(i)] = Branch{kNone, 0, 0, 0, 0, first_generation_, kNone, kNone, kNone};
        free_branches_[index(i)] = max_branches - 1 - i;
    }
    for (int32_t i = 0; i < num_pages; ++i) free_segments_[index(i)] = num_pages - 1 - i;
}

void Tree::refuse(Handle handle) {
    throw ReleasedHandleError("branch handle " + std::to_string(handle) +
                              " names no live branch: it was released, or another tree made it");
}

void Tree::require_branches(int32_t count) const {
    if (count > num_free_branches_) [[unlikely]] {
        throw OutOfBranchesError("need " + std::to_string(count) + " more branches, have room for " +
                                 std::to_string(num_free_branches_) + " of max_branches = " + std::to_string(branches_.size()) +
                                 ": release branches or raise max_branches");
    }
}

int32_t Tree::root(int32_t tenant) { return open_on(kNone, tenant); }

int32_t Tree::open_on(int32_t segment, int32_t tenant) {
    require_branches(1);
    int32_t length = 0;
    if (segment != kNone) {
        wake(segment);
        segments_[index(segment)].refs += 1;
        length = segments_[index(segment)].end;
    }
    num_branches_ += 1;
    return open_branch(segment, length, tenant);
}

void Tree::freeze_tail(Branch& branch, int32_t i) {
    const int32_t s = free_segments_[index(--num_free_segments_)];
    num_segments_ += 1;
    Segment& segment = segments_[index(s)];
    segment.parent = branch.parent;
    segment.refs = 1;
    segment.start = branch.start;
    segment.end = branch.length;
    segment.lead = branch.lead;
    segment.tenant = branch.tenant;
    segment.indexed = 0;
    segment.idle_children = 0;
    segment.hard_above = 0;
    if (branch.parent != kNone) {
        const Segment& above = segments_[index(branch.parent)];
        segment.hard_above = above.hard_above + (above.boundary == Boundary::hard ? 1 : 0);
    }
    if (stored(segment) % pool_.page_tokens() == 0) {
        segment.boundary = Boundary::aligned;
    } else if (segment.hard_above + 1 < max_levels_) {
        segment.boundary = Boundary::hard;
    } else {
        segment.boundary = Boundary::copied;
    }
    PageList& tail = tails_[index(i)];
    segment.pages = tail;
    tail.count = 0;
    branch.parent = s;  // the branch holds the segment in the place of the segment's parent, which the segment holds now
    branch.start = branch.length;
    branch.lead = 0;
}

void Tree::thaw(int32_t i) {
    Branch& branch = branches_[index(i)];
    const int32_t s = branch.parent;
    if (s == kNone || branch.length > branch.start) return;
    Segment& segment = segments_[index(s)];
    if (segment.refs > 1) return;
    branch.parent = segment.parent;
    branch.start = segment.start;
    branch.lead = segment.lead;
    tails_[index(i)] = segment.pages;
    segment.refs = 0;
    ++segments_version_;
    free_segments_[index(num_free_segments_++)] = s;
    num_segments_ -= 1;
}

void Tree::drop(int32_t s) {
    while (s != kNone) {
        Segment& segment = segments_[index(s)];
        if (--segment.refs > 0) {
            if (is_idle(segment)) rest(s);
            return;
        }
        tenant_pages_[segment.tenant] -= segment.pages.count;
        ++segments_version_;
        pool_.give_all(segment.pages);
        free_segments_[index(num_free_segments_++)] = s;
        num_segments_ -= 1;
        s = segment.parent;
    }
}

/// The segment has become idle: counts its pages, and those above it that are idle with it.
void Tree::rest(int32_t s) {
    while (true) {
        const Segment& segment = segments_[index(s)];
        count_idle(segment, segment.pages.count);
        s = segment.parent;
        if (s == kNone) return;
        segments_[index(s)].idle_children += 1;
        if (!is_idle(segments_[index(s)])) return;
    }
}

/// To be called before somebody takes hold of a segment that may be idle.
void Tree::wake(int32_t s) {
    bool idle = is_idle(segments_[index(s)]);
    while (idle) {
        const Segment& segment = segments_[index(s)];
        count_idle(segment, -segment.pages.count);
        s = segment.parent;
        if (s == kNone) return;
        idle = is_idle(segments_[index(s)]);
        segments_[index(s)].idle_children -= 1;
    }
}

void Tree::evict(int32_t s) {
    Segment& segment = segments_[index(s)];
    count_idle(segment, -segment.pages.count);
    if (segment.parent != kNone) {  // the index holds it too: it stays, as idle as it was
        Segment& above = segments_[index(segment.parent)];
        above.idle_children -= 1;
        above.refs -= 1;
    }
    segment.indexed = 0;
    segment.refs = 0;
    tenant_pages_[segment.tenant] -= segment.pages.count;
    ++segments_version_;
    pool_.give_all(segment.pages);
    free_segments_[index(num_free_segments_++)] = s;
    num_segments_ -= 1;
}

int32_t Tree::adopt_tokens(int32_t i, int32_t source, int32_t count) {
    const int32_t page = take_page(i);
    std::memcpy(pool_.tokens_of(page), pool_.tokens_of(source), sizeof(int32_t) * index(count));
    branches_[index(i)].length += count;
    return page;
}

std::pair<int32_t, int32_t> Tree::private_part(int32_t i) const {
    const Branch& branch = branches_[index(i)];
    int32_t pages = tails_[index(i)].count;
    int32_t shared = branch.start;
    for (int32_t s = branch.parent; s != kNone;) {
        const Segment& segment = segments_[index(s)];
        // One holder is the branch, or the segment below that is its own.
        if (segment.refs - segment.indexed - segment.idle_children > 1) break;
        pages += segment.pages.count;
        shared = segment.start;
        s = segment.parent;
    }
    return {pages, branch.length - shared};
}

int32_t Tree::extension_pages(int32_t i, int64_t count) const {
    if (count == 0) return 0;
    const Branch& branch = branches_[index(i)];
    const int32_t page_tokens = pool_.page_tokens();
    int64_t on_pages = branch.lead + branch.length - branch.start;
    if (branch.length == branch.start && branch.parent != kNone) {
        const Segment& segment = segments_[index(branch.parent)];
        if (segment.boundary == Boundary::copied) on_pages = stored(segment) % page_tokens;
    }
    return static_cast<int32_t>((on_pages + count + page_tokens - 1) / page_tokens) - tails_[index(i)].count;
}

void Tree::release(int32_t i) {
    Branch& branch = branches_[index(i)];
    const int32_t parent = branch.parent;
    branch.generation += 1;
    if (branch.length > branch.start) give_tail(branch, i);
    if (branch.generation != first_generation_) [[likely]] free_branches_[index(num_free_branches_++)] = i;
    drop(parent);
    num_branches_ -= 1;
}

void Tree::give_tail(Branch& branch, int32_t i) {
    PageList& tail = tails_[index(i)];
    tenant_pages_[branch.tenant] -= tail.count;
    pool_.give_all(tail);
    branch.lead = 0;
}

void Tree::freeze_full_pages(int32_t i) {
    Branch& branch = branches_[index(i)];
    PageList& tail = tails_[index(i)];
    const int32_t length = branch.length;
    const int32_t rest = (length - branch.start) % pool_.page_tokens();
    if (length - branch.start == rest) return;
    const int32_t page = rest > 0 ? pool_.detach_last(tail) : kNone;
    branch.length = length - rest;
    freeze_tail(branch, i);
    branch.length = length;
    if (rest > 0) pool_.attach(tail, page);
}

int32_t Tree::split(int32_t s, int32_t pages) {
    const int32_t u = free_segments_[index(--num_free_segments_)];
    num_segments_ += 1;
    Segment& lower = segments_[index(s)];
    Segment& upper = segments_[index(u)];
    upper = lower;
    upper.refs = 1;
    upper.idle_children = is_idle(lower) ? 1 : 0;
    upper.end = lower.start + pages * pool_.page_tokens();
    upper.boundary = Boundary::aligned;
    upper.indexed = 0;
    upper.pages.count = 0;
    pool_.split(lower.pages, pages, upper.pages);
    ++segments_version_;
    lower.parent = u;
    lower.start = upper.end;
    return u;
}

void Tree::truncate(int32_t i, int32_t num_tokens) {
    Branch& branch = branches_[index(i)];
    if (num_tokens < branch.start || num_tokens > branch.length) {
        throw std::invalid_argument("num_tokens = " + std::to_string(num_tokens) + ": expected from " +
                                    std::to_string(branch.start) + " (its shared tokens) to " + std::to_string(branch.length) +
                                    " (its length)");
    }
    shorten(branch, i, num_tokens);
}

void Tree::shorten(Branch& branch, int32_t i, int32_t num_tokens) {
    branch.length = num_tokens;
    const int32_t own = num_tokens - branch.start;
    PageList& tail = tails_[index(i)];
    const int32_t keep = own == 0 ? 0 : pages_for(branch.lead + own, pool_.page_tokens());
    if (own == 0) branch.lead = 0;
    tenant_pages_[branch.tenant] -= tail.count - keep;
    while (tail.count > keep) pool_.give_last(tail);
}

int32_t Tree::pages_needed(int32_t i, int32_t num_tokens) const {
    if (num_tokens == 0) return 0;
    const Branch& branch = branches_[index(i)];
    const int32_t page_tokens = pool_.page_tokens();
    int64_t on_pages = 0;
    int32_t pages = 0;
    if (branch.length > branch.start) {
        on_pages = branch.lead + branch.length - branch.start;
        pages = tails_[index(i)].count;
    } else if (branch.parent != kNone) {
        const Segment& segment = segments_[index(branch.parent)];
        if (segment.refs == 1) {
            on_pages = stored(segment);
            pages = segment.pages.count;
        } else if (segment.boundary == Boundary::copied) {
            on_pages = stored(segment) % page_tokens;
        }
    }
    return static_cast<int32_t>((on_pages + num_tokens + page_tokens - 1) / page_tokens) - pages;
}

bool Tree::append(int32_t i, const int32_t* tokens, int32_t count, int32_t* write_slots, PageCopy& copy) {
    Branch& branch = branches_[index(i)];
    PageList& tail = tails_[index(i)];
    const int32_t page_tokens = pool_.page_tokens();
    bool copied = false;
    if (branch.length == branch.start && branch.parent != kNone) {
        const Segment& segment = segments_[index(branch.parent)];
        if (segment.boundary == Boundary::copied) {
            branch.lead = static_cast<uint16_t>(stored(segment) % page_tokens);
            copy = PageCopy{pool_.last_page(segment.pages), take_page(i), branch.lead};
            std::memcpy(pool_.tokens_of(copy.dst), pool_.tokens_of(copy.src), sizeof(int32_t) * index(branch.lead));
            copied = true;
        }
    }
    int32_t on_pages = branch.lead + branch.length - branch.start;
    int32_t done = 0;
    while (done < count) {
        const int32_t offset = on_pages % page_tokens;
        const int32_t page = offset == 0 ? take_page(i) : pool_.last_page(tail);
        const int32_t run = std::min(count - done, page_tokens - offset);
        const int32_t first_slot = page * page_tokens + offset;
        std::memcpy(pool_.tokens() + first_slot, tokens + done, sizeof(int32_t) * index(run));
        for (int32_t t = 0; t < run; ++t) write_slots[done + t] = first_slot + t;
        done += run;
        on_pages += run;
    }
    branch.length += count;
    return copied;
}

void Tree::copy_tokens(int32_t i, int32_t* out) const {
    const int32_t page_tokens = pool_.page_tokens();
    const auto copy_run = [&](const PageList& list, int32_t lead, int32_t start, int32_t end) {
        pool_.for_each(list, [&](int32_t p, int32_t page) {
            const int32_t from = std::max(p * page_tokens, lead);
            const int32_t to = std::min((p + 1) * page_tokens, lead + end - start);
            if (to > from) {
                std::memcpy(out + start + from - lead, pool_.tokens_of(page) + (from - p * page_tokens),
                            sizeof(int32_t) * index(to - from));
            }
            return true;
        });
    };
    const Branch& branch = branches_[index(i)];
    copy_run(tails_[index(i)], branch.lead, branch.start, branch.length);
    for (int32_t s = branch.parent; s != kNone; s = segments_[index(s)].parent) {
        const Segment& segment = segments_[index(s)];
        copy_run(segment.pages, segment.lead, segment.start, segment.end);
    }
}

int32_t Tree::depth(int32_t i) const {
    int32_t depth = 0;
    for (int32_t s = branches_[index(i)].parent; s != kNone; s = segments_[index(s)].parent) ++depth;
    return depth;
}

int32_t Tree::count_pages(int32_t i) const {
    const Branch& branch = branches_[index(i)];
    bool followed = branch.length > branch.start;
    int32_t pages = tails_[index(i)].count;
    for (int32_t s = branch.parent; s != kNone; s = segments_[index(s)].parent) {
        const Segment& segment = segments_[index(s)];
        pages += followed ? pages_read(segment) : segment.pages.count;
        followed = true;
    }
    return pages;
}

void Tree::copy_pages(int32_t i, int32_t* out) const {
    const Branch& branch = branches_[index(i)];
    bool followed = branch.length > branch.start;
    out += count_pages(i) - tails_[index(i)].count;
    pool_.copy_ids(tails_[index(i)], tails_[index(i)].count, out);
    for (int32_t s = branch.parent; s != kNone; s = segments_[index(s)].parent) {
        const Segment& segment = segments_[index(s)];
        const int32_t count = followed ? pages_read(segment) : segment.pages.count;
        out -= count;
        pool_.copy_ids(segment.pages, count, out);
        followed = true;
    }
}

}  // namespace branchline
