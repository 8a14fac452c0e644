// Unit tests of the core, without Python.

#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "branchline/branch_tree.hpp"
#include "branchline/copy_pages.hpp"
#include "expect.hpp"

using namespace branchline;

namespace {

std::vector<int32_t> counting(int32_t count, int32_t first = 0) {
    std::vector<int32_t> out;
    for (int32_t i = 0; i < count; ++i) out.push_back(first + i);
    return out;
}

TreeSizes sizes_of(int64_t num_pages, int64_t page_tokens, int64_t max_levels = 8) {
    TreeSizes sizes{};
    sizes.num_pages = num_pages;
    sizes.page_tokens = page_tokens;
    sizes.max_branches = 1024;
    sizes.max_batch = 64;
    sizes.max_levels = max_levels;
    sizes.level_cost_pages = 0;
    return sizes;
}

void fill(BranchTree& tree, Handle branch, const std::vector<int32_t>& tokens) {
    tree.prefill(branch, 0, tokens.data(), static_cast<int64_t>(tokens.size()));
    tree.plan();
    tree.commit();
}

void page_lists_grow_and_shrink_across_chunks() {
    PagePool pool(500, 4, false);
    PageList list{};
    for (int32_t i = 0; i < 300; ++i) {
        EXPECT(pool.take(list) == pool.last_page(list));
        EXPECT(list.count == i + 1);
    }
    std::vector<int32_t> ids(300);
    pool.copy_ids(list, 300, ids.data());
    EXPECT(ids == counting(300));
    PageList upper{};
    pool.split(list, 123, upper);
    EXPECT(upper.count == 123 && list.count == 177 && pool.last_page(upper) == 122 && pool.last_page(list) == 299);
    for (int32_t i = 299; i >= 123; --i) {
        EXPECT(pool.last_page(list) == i);
        pool.give_last(list);
    }
    pool.give_all(upper);
    EXPECT(pool.num_free() == 500);
    EXPECT(pool.num_free_chunks() == pool.num_chunks());
    pool.take_many(list, 500);
    EXPECT(pool.num_free() == 0);
    int32_t seen = 0;
    pool.for_each(list, [&](int32_t i, int32_t) { return ++seen == i + 1; });
    EXPECT(seen == 500);
}

void long_lists_take_full_chunks_and_loose_pages_alike() {
    PagePool pool(200, 4, false);
    const auto ids_of = [&](const PageList& list) {
        std::vector<int32_t> ids(static_cast<std::size_t>(list.count));
        pool.copy_ids(list, list.count, ids.data());
        return ids;
    };
    std::vector<PageList> singles(40);
    for (PageList& list : singles) pool.take(list);
    for (const int32_t count : {7, 8, 16, 17, 32, 41, 160}) {
        // What was left loose by others is used up too, and nobody's page is taken twice.
        PageList list{};
        pool.take_many(list, count);
        EXPECT(list.count == count && pool.num_free() == 160 - count);
        std::vector<char> seen(200);
        for (const PageList& single : singles) seen[static_cast<std::size_t>(pool.first_page(single))] = 1;
        for (const int32_t page : ids_of(list)) EXPECT(seen[static_cast<std::size_t>(page)]++ == 0);
        EXPECT(pool.last_page(list) == ids_of(list).back() && pool.first_page(list) == ids_of(list).front());
        pool.for_each_free([&](int32_t page) { EXPECT(seen[static_cast<std::size_t>(page)]++ == 0); });
        // It grows and shrinks like any other.
        if (pool.num_free() > 0) {
            const int32_t page = pool.take(list);
            EXPECT(pool.detach_last(list) == page && list.count == count);
            pool.attach(list, page);
            pool.give_last(list);
        }
        pool.give_all(list);
        EXPECT(pool.num_free() == 160);
    }
    for (PageList& list : singles) pool.give_all(list);
    EXPECT(pool.num_free() == 200 && pool.num_free_chunks() == pool.num_chunks());
}

void many_small_owners_fit_the_chunks() {
    BranchTree tree(sizes_of(1000, 1));
    std::vector<Handle> branches;
    for (int i = 0; i < 200; ++i) {
        branches.push_back(tree.root(0));
        fill(tree, branches.back(), counting(5));
    }
    EXPECT(tree.tree().pool().num_free() == 0);
    tree.check();
    EXPECT_THROWS(OutOfPagesError, fill(tree, branches.front(), counting(1)));
    tree.release_many(branches.data(), 200);
    tree.check();
    EXPECT(tree.tree().pool().num_free() == 1000);
}

void a_fork_shares_and_a_copy_starts_full_pages_only() {
    for (const int64_t max_levels : {1, 8}) {
        BranchTree tree(sizes_of(64, 4, max_levels));
        const Handle root = tree.root(0);
        fill(tree, root, counting(10));
        const Handle child = tree.fork(root);
        EXPECT(tree.pages(child) == tree.pages(root));
        tree.join(child, 0, 99);
        tree.plan();
        EXPECT(tree.batch().num_copies() == (max_levels == 1 ? 1 : 0));
        tree.commit();
        EXPECT(tree.pages(child).size() == (max_levels == 1 ? 3u : 4u));
        EXPECT(tree.tokens(child)[10] == 99);
        EXPECT(tree.tokens(root) == counting(10));
    }
}

void the_index_finds_whole_pages_and_evicts_leaves_first() {
    BranchTree tree(sizes_of(16, 4));
    const Handle root = tree.root(1);
    fill(tree, root, counting(14));
    EXPECT(tree.insert(root) == 12);
    EXPECT(tree.shared_length(root) == 12 && tree.length(root) == 14);
    std::vector<int32_t> prompt = counting(14);
    const Handle same = tree.match(prompt.data(), 14, 1);
    EXPECT(tree.length(same) == 12);
    const Handle foreign = tree.match(prompt.data(), 14, 2);
    EXPECT(tree.length(foreign) == 0);
    prompt[6] = 1000;
    const Handle half = tree.match(prompt.data(), 14, 1);
    EXPECT(tree.length(half) == 4);
    tree.check();
    const Handle all[] = {root, same, foreign, half};
    tree.release_many(all, 4);
    EXPECT(tree.tree().pool().num_free() == 13);
    EXPECT(tree.evict(1) == 2);
    EXPECT(tree.length(tree.match(counting(14).data(), 14, 1)) == 4);
    EXPECT(tree.evict(16) == 0);
    tree.check();
    const Handle big = tree.root(1);
    EXPECT_THROWS(OutOfPagesError, fill(tree, big, counting(64)));
    tree.check();
}

void a_collision_shares_nothing() {
    Tree tree(64, 4, 32, 8, false);
    PrefixIndex index(tree, 0);  // every hash is 0
    const auto grow = [&](int32_t tenant, const std::vector<int32_t>& tokens) {
        const int32_t branch = tree.root(tenant);
        std::vector<int32_t> slots(tokens.size());
        PageCopy copy;
        tree.append(branch, tokens.data(), static_cast<int32_t>(tokens.size()), slots.data(), copy);
        return branch;
    };
    const auto match = [&](int32_t tenant, const std::vector<int32_t>& tokens) {
        return index.match(tokens.data(), static_cast<int32_t>(tokens.size()), tenant);
    };
    const std::vector<int32_t> words = counting(12);
    const int32_t mine = grow(1, words);
    EXPECT(index.insert(mine) == 12);
    EXPECT(match(2, words) == kNone);             // another tenant's
    EXPECT(match(1, counting(12, 100)) == kNone);  // other tokens
    const int32_t theirs = grow(2, words);
    EXPECT(index.insert(theirs) == 12);
    EXPECT(match(1, words) == tree.branch(mine).parent && tree.segment(match(1, words)).tenant == 1);
    EXPECT(match(2, words) == tree.branch(theirs).parent && tree.segment(match(2, words)).tenant == 2);
    // Half of it is found, which cuts it: its second part is then found after the first part only.
    std::vector<int32_t> half = words;
    half[5] = 1000;
    const int32_t upper = match(1, half);
    EXPECT(upper != kNone && tree.segment(upper).end == 4 && tree.segment(tree.branch(mine).parent).parent == upper);
    EXPECT(match(1, counting(8, 4)) == kNone);
    EXPECT(match(1, words) == tree.branch(mine).parent);
    // The same as the second part, but from the root; and the reverse.
    const int32_t second = grow(1, counting(8, 4));
    EXPECT(index.insert(second) == 8);
    EXPECT(match(1, counting(8, 4)) == tree.branch(second).parent);
    EXPECT(match(1, words) == tree.branch(mine).parent);
    index.check();
    tree.check({});
    for (const int32_t branch : {mine, theirs, second}) tree.release(branch);
    EXPECT(index.evict(64) == 8 && index.num_segments() == 0 && tree.pool().num_free() == 64);
    index.check();
    tree.check({});
}

void an_index_makes_room_when_pages_are_short() {
    BranchTree tree(sizes_of(4, 4));
    const Handle root = tree.root(0);
    fill(tree, root, counting(12));
    tree.insert(root);
    tree.release(root);
    EXPECT(tree.tree().pool().num_free() == 1);
    const Handle other = tree.root(0);
    fill(tree, other, counting(16, 100));
    EXPECT(tree.counters().evicted_pages == 3);
    tree.check();
}

void used_pages_wait_to_be_zeroed() {
    TreeSizes sizes = sizes_of(4, 4);
    sizes.zero_used = true;
    BranchTree tree(sizes);
    const Handle root = tree.root(0);
    fill(tree, root, counting(16));
    tree.release(root);
    const Handle next = tree.root(0);
    const std::string text = EXPECT_THROWS(OutOfPagesError, fill(tree, next, counting(1)));
    EXPECT(text.find("4 wait to be zeroed") != std::string::npos);
    EXPECT(tree.take_used().size() == 4);
    tree.plan();
    tree.commit();
    EXPECT(tree.length(next) == 1);
    tree.check();
}

void copies_take_the_filled_tokens_only() {
    constexpr int64_t kPages = 6, kBlocks = 7, kTokens = 16;
    for (const int64_t token_bytes : {1, 6, 128, 256}) {
        const int64_t page = kBlocks * kTokens * token_bytes;
        std::vector<char> data(static_cast<std::size_t>(kPages * page));
        for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31 / 7);
        const std::vector<char> before = data;
        const int32_t src[] = {0, 1, 2}, dst[] = {3, 4, 5}, tokens[] = {16, 5, 0};
        const int64_t copied = copy_pages(PoolLayout{data.data(), kPages, kBlocks, kTokens, token_bytes}, src, dst, tokens, 3);
        EXPECT(copied == kBlocks * 21 * token_bytes);
        for (int i = 0; i < 3; ++i) {
            for (int64_t b = 0; b < kBlocks; ++b) {
                for (int64_t x = 0; x < kTokens * token_bytes; ++x) {
                    const int64_t offset = b * kTokens * token_bytes + x;
                    const int32_t from = x < tokens[i] * token_bytes ? src[i] : dst[i];
                    EXPECT(data[static_cast<std::size_t>(dst[i] * page + offset)] ==
                           before[static_cast<std::size_t>(from * page + offset)]);
                }
            }
        }
    }
}

void bad_sizes_are_refused() {
    for (const auto& change : {+[](TreeSizes& s) { s.num_pages = 0; }, +[](TreeSizes& s) { s.num_pages = INT64_MAX; },
                               +[](TreeSizes& s) { s.page_tokens = 1 << 16; }, +[](TreeSizes& s) { s.max_levels = INT64_MIN; },
                               +[](TreeSizes& s) { s.num_pages = 1 << 28; }, +[](TreeSizes& s) { s.table_width = 4; }}) {
        TreeSizes sizes = sizes_of(8, 16);
        change(sizes);
        EXPECT_THROWS(std::invalid_argument, BranchTree{sizes});
    }
}

}  // namespace

int main() {
    page_lists_grow_and_shrink_across_chunks();
    long_lists_take_full_chunks_and_loose_pages_alike();
    many_small_owners_fit_the_chunks();
    a_fork_shares_and_a_copy_starts_full_pages_only();
    the_index_finds_whole_pages_and_evicts_leaves_first();
    a_collision_shares_nothing();
    an_index_makes_room_when_pages_are_short();
    used_pages_wait_to_be_zeroed();
    copies_take_the_filled_tokens_only();
    bad_sizes_are_refused();
    std::puts("units: ok");
}
