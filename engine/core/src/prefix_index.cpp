#include "branchline/prefix_index.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace branchline {

PrefixIndex::PrefixIndex(Tree& tree, uint32_t hash_mask)
    : tree_(tree),
      hash_mask_(hash_mask),
      mask_(std::bit_ceil(static_cast<uint32_t>(tree.max_segments()) * 2u) - 1u),
      table_(static_cast<std::size_t>(mask_) + 1),
      links_(at(tree.max_segments())),
      path_(at(tree.max_segments())),
      heads_(static_cast<std::size_t>(mask_) + 1) {}

uint32_t PrefixIndex::hash_of(int32_t parent, int32_t tenant, const int32_t* page) const {
    // Multiply and rotate, as in wyhash and its kin; equality is decided by comparison.
    uint64_t h = (static_cast<uint64_t>(static_cast<uint32_t>(parent)) << 16 | static_cast<uint64_t>(tenant)) * 0x9E3779B97F4A7C15ull;
    for (int32_t i = 0; i < tree_.pool().page_tokens(); ++i) {
        h = std::rotl((h ^ static_cast<uint32_t>(page[i])) * 0xD6E8FEB86659FD93ull, 29);
    }
    h *= 0x9E3779B97F4A7C15ull;
    return static_cast<uint32_t>(h >> 32) & hash_mask_;
}

bool PrefixIndex::same_page(const int32_t* a, const int32_t* b) const {
    return std::memcmp(a, b, sizeof(int32_t) * at(tree_.pool().page_tokens())) == 0;
}

const int32_t* PrefixIndex::first_page(int32_t s) const {
    return tree_.pool().tokens_of(tree_.pool().first_page(tree_.segment(s).pages));
}

int32_t PrefixIndex::find(int32_t parent, int32_t tenant, const int32_t* page) const {
    const uint32_t hash = hash_of(parent, tenant, page);
    for (uint32_t i = hash & mask_;; i = (i + 1) & mask_) {
        const int32_t s = table_[i] - 1;
        if (s == kNone) return kNone;
        if (links_[at(s)].hash != hash) continue;
        const Segment& segment = tree_.segment(s);
        if (segment.parent == parent && segment.tenant == tenant && same_page(first_page(s), page)) return s;
    }
}

int32_t PrefixIndex::bucket_of(int32_t parent, int32_t tenant, int32_t token) const {
    uint64_t h = (static_cast<uint64_t>(static_cast<uint32_t>(parent)) << 32 | static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
    h = (h ^ static_cast<uint64_t>(tenant)) * 0xD6E8FEB86659FD93ull;
    return static_cast<int32_t>(static_cast<uint32_t>(h >> 32) & hash_mask_ & mask_);
}

void PrefixIndex::put(int32_t s) {
    const Segment& segment = tree_.segment(s);
    const uint32_t hash = hash_of(segment.parent, segment.tenant, first_page(s));
    Link& link = links_[at(s)];
    link.hash = hash;
    link.bucket = bucket_of(segment.parent, segment.tenant, *first_page(s));
    int32_t& head = heads_[at(link.bucket)];
    link.previous = kNone;
    link.next = head - 1;
    if (link.next != kNone) links_[at(link.next)].previous = s;
    head = s + 1;
    uint32_t i = hash & mask_;
    while (table_[i] != 0) i = (i + 1) & mask_;
    table_[i] = s + 1;
}

/// Takes a segment out of the table. Later entries of its run move up, so that no mark is needed where it was.
void PrefixIndex::take_out(int32_t s) {
    const Link& link = links_[at(s)];
    if (link.next != kNone) links_[at(link.next)].previous = link.previous;
    if (link.previous != kNone) {
        links_[at(link.previous)].next = link.next;
    } else {
        heads_[at(link.bucket)] = link.next + 1;
    }
    uint32_t i = links_[at(s)].hash & mask_;
    while (table_[i] != s + 1) i = (i + 1) & mask_;
    for (uint32_t j = (i + 1) & mask_; table_[j] != 0; j = (j + 1) & mask_) {
        const uint32_t home = links_[at(table_[j] - 1)].hash & mask_;
        if (((j - home) & mask_) >= ((j - i) & mask_)) {
            table_[i] = table_[j];
            i = j;
        }
    }
    table_[i] = 0;
}

void PrefixIndex::link_newest(int32_t s) {
    Link& link = links_[at(s)];
    link.newer = kNone;
    link.older = newest_;
    (newest_ == kNone ? oldest_ : links_[at(newest_)].newer) = s;
    newest_ = s;
}

void PrefixIndex::link_newer_than(int32_t s, int32_t older) {
    Link& link = links_[at(s)];
    link.older = older;
    link.newer = links_[at(older)].newer;
    links_[at(older)].newer = s;
    (link.newer == kNone ? newest_ : links_[at(link.newer)].older) = s;
}

void PrefixIndex::unlink(int32_t s) {
    const Link& link = links_[at(s)];
    (link.newer == kNone ? newest_ : links_[at(link.newer)].older) = link.older;
    (link.older == kNone ? oldest_ : links_[at(link.older)].newer) = link.newer;
}

/// Marks a segment and those above it as used now. A parent is always newer than its children, so leaves go first.
void PrefixIndex::touch(int32_t s) {
    for (; s != kNone; s = tree_.segment(s).parent) {
        unlink(s);
        link_newest(s);
    }
}

/// Cuts an indexed segment; both parts are indexed then. Returns the upper one.
int32_t PrefixIndex::cut(int32_t s, int32_t pages) {
    take_out(s);
    const int32_t upper = tree_.split(s, pages);
    tree_.hold(upper);
    tree_.set_indexed(upper, true);
    ++num_indexed_;
    put(upper);
    put(s);
    link_newer_than(upper, s);
    return upper;
}

template <typename Visit>
void PrefixIndex::walk(const int32_t* tokens, int32_t count, int32_t tenant, Visit visit) const {
    const int32_t page_tokens = tree_.pool().page_tokens();
    int32_t parent = kNone;
    int32_t done = 0;
    while (count - done >= page_tokens) {
        const int32_t s = find(parent, tenant, tokens + done);
        if (s == kNone) return;
        const PageList& pages = tree_.segment(s).pages;
        int32_t same = 0;
        tree_.pool().for_each(pages, [&](int32_t i, int32_t page) {
            const int32_t from = done + i * page_tokens;
            if (count - from < page_tokens || !same_page(tree_.pool().tokens_of(page), tokens + from)) return false;
            same = i + 1;
            return true;
        });
        done += same * page_tokens;
        visit(s, same, done);
        if (same < pages.count) return;
        parent = s;
    }
}

int32_t PrefixIndex::match(const int32_t* tokens, int32_t count, int32_t tenant) {
    int32_t found = kNone;
    int32_t same = 0;
    walk(tokens, count, tenant, [&](int32_t s, int32_t pages, int32_t) {
        found = s;
        same = pages;
    });
    if (found != kNone && same < tree_.segment(found).pages.count) found = cut(found, same);
    touch(found);
    return found;
}

Found PrefixIndex::peek(const int32_t* tokens, int32_t count, int32_t tenant) const {
    Found found{0, 0};
    walk(tokens, count, tenant, [&](int32_t s, int32_t pages, int32_t done) {
        found.tokens = done;
        if (Tree::is_idle(tree_.segment(s))) found.idle_pages += pages;
    });
    return found;
}

HalfPage PrefixIndex::half_page(int32_t parent, int32_t tenant, const int32_t* tokens, int32_t count) const {
    HalfPage best{kNone, 0};
    if (count == 0) return best;
    const int32_t most = std::min(count, tree_.pool().page_tokens());
    int32_t candidates = 0;
    for (int32_t s = heads_[at(bucket_of(parent, tenant, *tokens))] - 1; s != kNone; s = links_[at(s)].next) {
        const Segment& segment = tree_.segment(s);
        if (segment.parent != parent || segment.tenant != tenant) continue;
        const int32_t* const page = first_page(s);
        int32_t same = 0;
        while (same < most && page[same] == tokens[same]) ++same;
        if (same > best.tokens) best = HalfPage{tree_.pool().first_page(segment.pages), same};
        if (++candidates == kCandidates) break;
    }
    return best;
}

int32_t PrefixIndex::insert(int32_t branch) {
    int32_t depth = 0;
    bool full = true;
    for (int32_t s = tree_.branch(branch).parent; s != kNone; s = tree_.segment(s).parent) {
        full = full && tree_.segment(s).boundary == Boundary::aligned;
        ++depth;
    }
    if (full) {
        const int32_t parent = tree_.branch(branch).parent;
        tree_.freeze_full_pages(branch);
        if (tree_.branch(branch).parent != parent) ++depth;
    }
    int32_t s = tree_.branch(branch).parent;
    for (int32_t i = depth - 1; i >= 0; --i) {
        path_[at(i)] = s;
        s = tree_.segment(s).parent;
    }
    int32_t last = kNone;
    for (int32_t i = 0; i < depth; ++i) {
        s = path_[at(i)];
        const bool cuts = tree_.segment(s).boundary != Boundary::aligned;
        if (tree_.segment(s).indexed == 0) {
            const int32_t pages = Tree::stored(tree_.segment(s)) / tree_.pool().page_tokens();
            if (pages == 0 || find(last, tree_.segment(s).tenant, first_page(s)) != kNone) break;
            if (cuts) s = tree_.split(s, pages);
            tree_.hold(s);
            tree_.set_indexed(s, true);
            ++num_indexed_;
            put(s);
            link_newest(s);
        }
        last = s;
        if (cuts) break;
    }
    touch(last);
    return last == kNone ? 0 : tree_.segment(last).end;
}

int32_t PrefixIndex::evict(int32_t num_pages) {
    int32_t given = 0;
    for (int32_t s = oldest_; s != kNone && given < num_pages;) {
        const int32_t newer = links_[at(s)].newer;
        if (tree_.segment(s).refs == 1) {
            given += tree_.segment(s).pages.count;
            take_out(s);
            unlink(s);
            --num_indexed_;
            tree_.evict(s);
        }
        s = newer;
    }
    return given;
}

void PrefixIndex::check() const {
    const auto require = [](bool ok, int32_t s, const char* what) {
        if (!ok) throw CoreError("invariant broken: indexed segment " + std::to_string(s) + " " + what);
    };
    std::vector<char> seen(at(tree_.max_segments()));
    int32_t count = 0;
    int32_t newer = kNone;
    for (int32_t s = newest_; s != kNone; s = links_[at(s)].older) {
        const Segment& segment = tree_.segment(s);
        require(++count <= num_indexed_, s, "is in a list that doesn't end");
        require(links_[at(s)].newer == newer, s, "has a broken link");
        require(segment.indexed == 1, s, "doesn't know that it is indexed");
        require(segment.boundary == Boundary::aligned && segment.lead == 0, s, "has a page that isn't full");
        require(segment.parent == kNone || seen[at(segment.parent)] != 0, s, "is newer than its parent, or the parent isn't indexed");
        require(find(segment.parent, segment.tenant, first_page(s)) == s, s, "isn't found");
        const int32_t bucket = links_[at(s)].bucket;
        require(bucket == bucket_of(segment.parent, segment.tenant, *first_page(s)), s, "is in a wrong bucket");
        const int32_t previous = links_[at(s)].previous;
        require((previous == kNone ? heads_[at(bucket)] - 1 : links_[at(previous)].next) == s, s, "isn't in its bucket");
        seen[at(s)] = 1;
        newer = s;
    }
    require(count == num_indexed_ && newer == oldest_, oldest_, "is missing from the list");
    int32_t entries = 0;
    for (std::size_t i = 0; i < table_.size(); ++i) entries += table_[i] != 0 ? 1 : 0;
    require(entries == num_indexed_, entries, "counts don't match the table");
}

}  // namespace branchline
