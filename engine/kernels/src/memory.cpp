#include "branchline/kernels/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace branchline::kernels {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

std::unique_ptr<std::byte, void (*)(void*)> allocate(std::size_t bytes) {
    if (bytes > SIZE_MAX - kHugePage) throw std::bad_alloc();
    const std::size_t alignment = bytes >= kHugePage ? kHugePage : kLine;
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), alignment);
    std::unique_ptr<std::byte, void (*)(void*)> memory(static_cast<std::byte*>(std::aligned_alloc(alignment, size)), std::free);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // Advice: where it isn't taken, only speed suffers.
    if (alignment == kHugePage) (void)madvise(memory.get(), size, MADV_HUGEPAGE);
#endif
    return memory;
}

std::shared_ptr<std::byte> Arena::take(std::size_t bytes) {
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kLine);
    const std::lock_guard lock(mutex_);
    num_bytes_ += static_cast<int64_t>(size);
    if (size > kChunk / 2) return allocate(size);
    if (size > left_) {
        chunk_ = allocate(kChunk);
        left_ = kChunk;
        used_ = 0;
    }
    std::shared_ptr<std::byte> out(chunk_, chunk_.get() + used_);
    used_ += size;
    left_ -= size;
    return out;
}

int64_t Arena::num_bytes() const {
    const std::lock_guard lock(mutex_);
    return num_bytes_;
}

}  // namespace branchline::kernels
