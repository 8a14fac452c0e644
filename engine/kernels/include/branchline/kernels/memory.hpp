// Memory for weights and activations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace branchline::kernels {

/// Memory that begins on a cache line, not initialised. From 2 MiB on it begins on a huge page and asks for huge pages:
/// streaming weights through 4 KiB pages was measured at half the bandwidth. Throws std::bad_alloc.
std::unique_ptr<std::byte, void (*)(void*)> allocate(std::size_t bytes);

/// Places many matrices side by side, so that those below 2 MiB share huge pages too. A matrix keeps the memory that it lies
/// in, so the arena may go first. Any number of threads may take from it.
class Arena {
  public:
    static constexpr std::size_t kChunk = std::size_t{32} << 20;

    /// `bytes` that begin on a cache line, not initialised. Throws std::bad_alloc.
    std::shared_ptr<std::byte> take(std::size_t bytes);
    /// Handed out so far.
    int64_t num_bytes() const;

  private:
    mutable std::mutex mutex_;
    std::shared_ptr<std::byte> chunk_;
    std::size_t left_ = 0;
    std::size_t used_ = 0;
    int64_t num_bytes_ = 0;
};

}  // namespace branchline::kernels
