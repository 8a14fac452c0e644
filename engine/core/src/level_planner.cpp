#include "branchline/level_planner.hpp"

#include <algorithm>
#include <climits>

namespace branchline {

namespace {
constexpr int32_t kEnd = INT32_MIN;
constexpr int32_t kNo = 0;
constexpr int32_t kHard = 1;
constexpr int32_t kSoft = 2;
}  // namespace

LevelPlanner::LevelPlanner(const Tree& tree, int32_t max_batch, int32_t level_cost_pages)
    : tree_(tree),
      level_cost_pages_(level_cost_pages),
      max_soft_(tree.max_levels()),
      stride_(at(max_batch) + 1),
      visits_(at(tree.max_segments())),
      preorder_(at(tree.max_segments())),
      row_next_(at(max_batch)),
      levels_(at(2 * tree.max_levels())),
      covered_(levels_.size()),
      group_segment_(levels_.size() * stride_),
      qo_indptr_(levels_.size() * stride_),
      kv_indptr_(levels_.size() * stride_),
      last_page_len_(levels_.size() * stride_),
      // A row reads each page at most once, so this is the worst case; what isn't written takes no memory.
      kv_indices_(at(max_batch) * at(tree.pool().num_pages()), Residence::as_used) {
    for (std::size_t i = 0; i < levels_.size(); ++i) {
        levels_[i] = LevelArrays{0, 0, qo_indptr_.data() + i * stride_, kv_indptr_.data() + i * stride_,
                                 last_page_len_.data() + i * stride_, kv_indices_.data()};
    }
}

void LevelPlanner::order_rows(const int32_t* branches, int32_t count, int32_t* order) {
    if (++epoch_ == 0) {  // the counter went round: forget all marks
        for (std::size_t i = 0; i < visits_.size(); ++i) visits_[i].epoch = 0;
        epoch_ = 1;
    }
    // Link each segment that a row passes through below its parent. Backwards, because links are put first.
    int32_t top = kEnd;
    for (int32_t i = count - 1; i >= 0; --i) {
        int32_t child = ~i;
        int32_t* child_next = &row_next_[at(i)];
        int32_t s = tree_.branch(branches[i]).parent;
        for (;;) {
            if (s == kNone) {
                *child_next = top;
                top = child;
                break;
            }
            Visit& visit = visits_[at(s)];
            if (visit.epoch == epoch_) {
                *child_next = visit.first_child;
                visit.first_child = child;
                break;
            }
            visit.epoch = epoch_;
            *child_next = kEnd;
            visit.first_child = child;
            child = s;
            child_next = &visit.next;
            s = tree_.segment(s).parent;
        }
    }
    // Walk it depth first, without recursion: chains may be 10,000 segments deep.
    num_visited_ = 0;
    int32_t row = 0;
    int32_t above = kNone;
    int32_t node = top;
    for (;;) {
        if (node == kEnd) {
            if (above == kNone) break;
            Visit& visit = visits_[at(above)];
            visit.end_row = row;
            node = visit.next;
            above = tree_.segment(above).parent;
        } else if (node < 0) {
            order[row++] = ~node;
            node = row_next_[at(~node)];
        } else {
            Visit& visit = visits_[at(node)];
            visit.first_row = row;
            preorder_[at(num_visited_++)] = node;
            above = node;
            node = visit.first_child;
        }
    }
}

/// Sets what is known of a segment from what is known of its parent. First all shared runs are kept, to add up what each level
/// would save; then only those of the chosen levels.
void LevelPlanner::look_at(int32_t s, bool choosing) {
    const Segment& segment = tree_.segment(s);
    Visit& visit = visits_[at(s)];
    visit.pending = 0;
    visit.depth = 0;
    visit.soft = 0;
    if (segment.parent != kNone) {
        const Visit& above = visits_[at(segment.parent)];
        visit.pending = above.kept != kNo ? 0 : above.pending;
        visit.depth = above.depth + (above.kept != kNo ? 1 : 0);
        visit.soft = above.soft + (above.kept == kSoft ? 1 : 0);
    }
    visit.pending += tree_.pages_read(segment);
    visit.kept = kNo;
    if (choosing) visit.choice = kNone;
    if (segment.boundary == Boundary::hard) {
        visit.kept = kHard;
        return;
    }
    const int32_t child = visit.first_child;
    const bool run_goes_on = child >= 0 && visits_[at(child)].next == kEnd;
    const int32_t rows = visit.end_row - visit.first_row;
    if (run_goes_on || rows == 1 || visit.pending == 0) return;
    if (!choosing) {
        if (visit.choice >= 0 && chosen_[visit.choice]) visit.kept = kSoft;
        return;
    }
    if (visit.soft == kChoices) return;
    visit.choice = visit.soft;
    visit.kept = kSoft;
    saved_pages_[visit.choice] += static_cast<int64_t>(rows - 1) * visit.pending;
    num_choices_ = std::max(num_choices_, visit.choice + 1);
}

/// Chooses the levels that are worth a level.
void LevelPlanner::choose() {
    num_choices_ = 0;
    for (int64_t& saved : saved_pages_) saved = 0;
    for (int32_t i = 0; i < num_visited_; ++i) look_at(preorder_[at(i)], true);
    bool all = num_choices_ <= max_soft_;
    for (int32_t c = 0; c < num_choices_; ++c) {
        chosen_[c] = saved_pages_[c] >= level_cost_pages_;
        all = all && chosen_[c];
    }
    if (all) return;
    int32_t chosen = 0;
    for (int32_t c = 0; c < num_choices_; ++c) chosen += chosen_[c] ? 1 : 0;
    for (; chosen > max_soft_; --chosen) {  // too many: give up the one that saves least
        int32_t least = kNone;
        for (int32_t c = 0; c < num_choices_; ++c) {
            if (chosen_[c] && (least == kNone || saved_pages_[c] < saved_pages_[least])) least = c;
        }
        chosen_[least] = false;
    }
    for (int32_t i = 0; i < num_visited_; ++i) look_at(preorder_[at(i)], false);
}

void LevelPlanner::add_group(int32_t l, int32_t s) {
    const Visit& visit = visits_[at(s)];
    const Segment& segment = tree_.segment(s);
    while (num_levels_ <= l + 1) {  // a shared level more: begin it
        levels_[at(num_levels_ - 1)].num_groups = 0;
        covered_[at(num_levels_ - 1)] = 0;
        ++num_levels_;
    }
    LevelArrays& level = levels_[at(l)];
    const auto add = [&](int32_t end_row, int32_t pages, int32_t last_page_len, int32_t of) {
        const int32_t g = level.num_groups++;
        if (g == 0) level.qo_indptr[0] = level.kv_indptr[0] = 0;
        level.qo_indptr[g + 1] = row_indptr_[end_row];
        level.kv_indptr[g + 1] = level.kv_indptr[g] + pages;
        level.last_page_len[g] = last_page_len;
        group_segment_[at(l) * stride_ + at(g)] = of;
    };
    if (covered_[at(l)] < visit.first_row) add(visit.first_row, 0, 0, kNone);
    const int32_t page_tokens = tree_.pool().page_tokens();
    const int32_t last = segment.boundary == Boundary::hard ? Tree::stored(segment) % page_tokens : page_tokens;
    add(visit.end_row, visit.pending, last, s);
    covered_[at(l)] = visit.end_row;
}

/// Writes `pages` page numbers that end with segment `s`'s, backwards from `end`.
void LevelPlanner::fill_up(int32_t s, int32_t pages, int32_t* end) const {
    while (pages > 0) {
        const Segment& segment = tree_.segment(s);
        const int32_t count = tree_.pages_read(segment);
        end -= count;
        pages -= count;
        tree_.pool().copy_ids(segment.pages, count, end);
        s = segment.parent;
    }
}

/// `fill_up` at the beginning of the arena, unless it begins so already.
void LevelPlanner::fill_first(int32_t s, int32_t pages) {
    if (pages > 0 && s == first_segment_ && pages == first_pages_ && tree_.segments_version() == first_version_) return;
    fill_up(s, pages, kv_indices_.data() + pages);
    first_segment_ = s;
    first_pages_ = pages;
    first_version_ = tree_.segments_version();
}

void LevelPlanner::build(const int32_t* branches, int32_t count, const int32_t* row_indptr) {
    row_indptr_ = row_indptr;
    num_levels_ = 1;
    choose();
    for (int32_t i = 0; i < num_visited_; ++i) {
        const int32_t s = preorder_[at(i)];
        if (visits_[at(s)].kept != kNo) add_group(visits_[at(s)].depth, s);
    }
    int32_t* ids = kv_indices_.data();
    for (int32_t l = 0; l + 1 < num_levels_; ++l) {
        LevelArrays& level = levels_[at(l)];
        if (covered_[at(l)] < count) {
            const int32_t g = level.num_groups++;
            level.qo_indptr[g + 1] = row_indptr[count];
            level.kv_indptr[g + 1] = level.kv_indptr[g];
            level.last_page_len[g] = 0;
            group_segment_[at(l) * stride_ + at(g)] = kNone;
        }
        level.kv_indices = ids;
        for (int32_t g = 0; g < level.num_groups; ++g) {
            const int32_t s = group_segment_[at(l) * stride_ + at(g)];
            if (s == kNone) continue;
            const int32_t pages = level.kv_indptr[g + 1] - level.kv_indptr[g];
            if (l == 0 && level.kv_indptr[g] == 0) {
                fill_first(s, pages);
            } else {
                fill_up(s, pages, ids + level.kv_indptr[g + 1]);
            }
        }
        level.num_indices = level.kv_indptr[level.num_groups];
        ids += level.num_indices;
    }
    LevelArrays& level = own();
    level.num_groups = count;
    level.kv_indices = ids;
    level.qo_indptr[0] = level.kv_indptr[0] = 0;
    const int32_t page_tokens = tree_.pool().page_tokens();
    int32_t end = 0;
    for (int32_t r = 0; r < count; ++r) {
        const Branch& branch = tree_.branch(branches[r]);
        const PageList& tail = tree_.tail(branches[r]);
        int32_t pending = 0;
        if (branch.parent != kNone) {
            const Visit& above = visits_[at(branch.parent)];
            pending = above.kept != kNo ? 0 : above.pending;
        }
        if (ids == kv_indices_.data() && end == 0) {
            fill_first(branch.parent, pending);
        } else {
            fill_up(branch.parent, pending, ids + end + pending);
        }
        tree_.pool().copy_ids(tail, tail.count, ids + end + pending);
        end += pending + tail.count;
        level.qo_indptr[r + 1] = row_indptr[r + 1];
        level.kv_indptr[r + 1] = end;
        level.last_page_len[r] = (branch.lead + branch.length - branch.start - 1) % page_tokens + 1;
    }
    level.num_indices = end;
}

}  // namespace branchline
