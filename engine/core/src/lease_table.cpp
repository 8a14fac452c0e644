#include "branchline/lease_table.hpp"

#include <string>

namespace branchline {

LeaseTable::LeaseTable(Tree& tree, int32_t max_leases)
    : tree_(tree),
      num_free_(max_leases),
      first_generation_(Tree::draw_generation()),
      leases_(at(max_leases)),
      free_(at(max_leases)) {
    for (int32_t i = 0; i < max_leases; ++i) {
        leases_[at(i)] = Lease{{}, first_generation_, 0};
        free_[at(i)] = max_leases - 1 - i;
    }
}

int32_t LeaseTable::resolve(Handle lease) const {
    const auto i = static_cast<uint32_t>(lease);
    const auto generation = static_cast<uint32_t>(lease >> 32);
    if (i >= leases_.size() || (generation & 1u) == 0 || leases_[i].generation != generation) [[unlikely]] {
        throw ReleasedHandleError("lease handle " + std::to_string(lease) +
                                  " names no lease: its pages were given back, or another tree made it");
    }
    return static_cast<int32_t>(i);
}

void LeaseTable::lend(int32_t num_pages, int32_t tenant, int32_t count, Handle* out) {
    if (count > num_free_) [[unlikely]] {
        throw OutOfBranchesError("need " + std::to_string(count) + " more leases, have room for " + std::to_string(num_free_) +
                                 " of max_branches = " + std::to_string(leases_.size()) + ": give leases back");
    }
    for (int32_t k = 0; k < count; ++k) {
        const int32_t i = free_[at(--num_free_)];
        Lease& lease = leases_[at(i)];
        lease.generation += 1;
        lease.tenant = tenant;
        tree_.pool().take_many(lease.pages, num_pages);
        out[k] = static_cast<Handle>(lease.generation) << 32 | static_cast<uint32_t>(i);
    }
    num_leases_ += count;
    tree_.count_pages_of(tenant, num_pages * count);
}

void LeaseTable::give_back(const Handle* leases, int64_t count) {
    // Each lease that was seen gets its next generation at once, so that its second appearance doesn't resolve.
    int64_t seen = 0;
    try {
        for (; seen < count; ++seen) leases_[at(resolve(leases[seen]))].generation += 1;
    } catch (const ReleasedHandleError&) {
        while (--seen >= 0) leases_[static_cast<uint32_t>(leases[seen])].generation -= 1;
        throw;
    }
    for (int64_t k = 0; k < count; ++k) {
        const auto i = static_cast<int32_t>(static_cast<uint32_t>(leases[k]));
        Lease& lease = leases_[at(i)];
        tree_.count_pages_of(lease.tenant, -lease.pages.count);
        tree_.pool().give_all(lease.pages);
        if (lease.generation != first_generation_) [[likely]] free_[at(num_free_++)] = i;
    }
    num_leases_ -= static_cast<int32_t>(count);
}

}  // namespace branchline
