// Pages lent to somebody outside the tree: a transfer, a swap.
#pragma once

#include <cstdint>

#include "branchline/tree.hpp"

namespace branchline {

/// Leases of pages. A lease's handle carries a generation, as a branch's does.
class LeaseTable {
  public:
    LeaseTable(Tree& tree, int32_t max_leases);

    /// Takes `num_pages` pages, which must be free, for each of `count` leases. Throws OutOfBranchesError.
    void lend(int32_t num_pages, int32_t tenant, int32_t count, Handle* out);
    /// Gives pages back. Checks all handles first. Throws ReleasedHandleError.
    void give_back(const Handle* leases, int64_t count);
    const PageList& pages(Handle lease) const { return leases_[static_cast<std::size_t>(resolve(lease))].pages; }
    int32_t num_leases() const { return num_leases_; }

    /// Calls visit(pages, tenant) for each lease.
    template <typename Visit>
    void for_each(Visit visit) const {
        for (std::size_t i = 0; i < leases_.size(); ++i) {
            if ((leases_[i].generation & 1u) != 0) visit(leases_[i].pages, leases_[i].tenant);
        }
    }

  private:
    struct Lease {
        PageList pages;
        uint32_t generation;  // odd while it is out
        int32_t tenant;
    };

    static std::size_t at(int32_t i) { return static_cast<std::size_t>(i); }
    int32_t resolve(Handle lease) const;

    Tree& tree_;
    int32_t num_leases_ = 0;
    int32_t num_free_;
    uint32_t first_generation_;
    Buffer<Lease> leases_;
    Buffer<int32_t> free_;
};

}  // namespace branchline
