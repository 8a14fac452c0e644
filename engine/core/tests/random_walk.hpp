// Operations drawn at random on a BranchTree, beside a model that only knows each branch's tokens.
#pragma once

#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "branchline/branch_tree.hpp"

namespace branchline::test {

/// Every step's arrays are read as a model would: each row must find its own history, in order, and write only to pages that
/// no other branch reads. Aborts on the first difference.
class RandomWalk {
  public:
    explicit RandomWalk(uint64_t seed);

    void operate();
    /// Verifies all invariants and all branches' tokens.
    void verify();
    /// Releases everything; every page must be free then.
    void finish();
    const BranchTree& tree() const { return tree_; }

  private:
    struct Live {
        Handle handle;
        std::vector<int32_t> tokens;
        int32_t tenant;
        int32_t slot;  // of its decode row, or kNone
        std::vector<int32_t> queued;
    };

    int32_t draw(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random_); }
    Live& any() { return live_[static_cast<std::size_t>(draw(0, static_cast<int32_t>(live_.size()) - 1))]; }
    std::vector<int32_t> words(int32_t most);
    bool fits(int64_t branches) const;
    void fork();
    void release();
    void truncate();
    void join();
    void prefill();
    void step(bool commit);
    void lend();
    void match();
    void swap();
    void release_private();
    std::vector<std::vector<int32_t>> reads();

    std::mt19937_64 random_;
    TreeSizes sizes_;
    BranchTree tree_;
    int32_t vocabulary_;
    std::vector<Live> live_;
    std::vector<Handle> leases_;
    std::vector<Handle> stale_;
    std::vector<uint64_t> written_;  // slot -> hash of the history that was written there
};

}  // namespace branchline::test
