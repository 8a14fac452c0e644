// Memory for weights and activations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace branchline::kernels {

/// Memory that begins on a cache line, not initialised. From 2 MiB on it begins on a huge page and asks for huge pages:
/// streaming weights through 4 KiB pages was measured at half the bandwidth. Throws std::bad_alloc.
std::unique_ptr<std::byte, void (*)(void*)> allocate(std::size_t bytes);

/// Places many matrices side by side, so that those below 2 MiB share huge pages too. A matrix keeps the memory that it lies
/// in, so the arena may go first. Any number of threads may take from it.
///
/// What was packed in one arena can be saved, block after block, and mapped by another one: then the same takes in the same
/// order give memory that is filled already, which all processes that map the file share.
class Arena {
  public:
    static constexpr std::size_t kChunk = std::size_t{32} << 20;

    Arena() = default;
    /// Maps the first `bytes` of a file, for reading. Throws std::system_error.
    Arena(const std::string& path, std::size_t bytes);

    /// `bytes` that begin on a cache line: not initialised, or what the file has there, which mustn't be written. Throws
    /// std::bad_alloc; std::invalid_argument when the file has no more.
    std::shared_ptr<std::byte> take(std::size_t bytes);
    /// Whether what is taken holds its contents already.
    bool is_filled() const { return is_filled_; }
    /// Handed out so far.
    int64_t num_bytes() const;
    /// What was handed out, in order, each rounded up to whole cache lines.
    std::vector<std::span<const std::byte>> blocks() const;

  private:
    mutable std::mutex mutex_;
    std::shared_ptr<std::byte> chunk_;
    std::size_t left_ = 0;
    std::size_t used_ = 0;
    bool is_filled_ = false;
    std::vector<std::pair<std::shared_ptr<std::byte>, std::size_t>> taken_;
};

}  // namespace branchline::kernels
