#include "branchline/buffer.hpp"

#include <atomic>
#include <cstdint>
#include <new>
#include <sys/mman.h>

namespace branchline {

namespace {

// Arrays that all began at a page's first byte would meet in the same few sets of the first cache, and a load would be taken
// to depend on a store to another array at the same offset. So each begins some lines further on than the one before.
constexpr std::size_t kSpan = 4096;
constexpr std::size_t kStride = 13 * 64;

std::size_t next_offset() {
    static std::atomic<std::size_t> maps{0};
    return maps.fetch_add(1, std::memory_order_relaxed) * kStride % kSpan;
}

}  // namespace

void* map_zeroed(std::size_t bytes, Residence residence) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (residence == Residence::as_used) flags |= MAP_NORESERVE;
#ifdef MAP_POPULATE
    if (residence == Residence::now) flags |= MAP_POPULATE;
#endif
    void* data = mmap(nullptr, bytes + kSpan, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(data) + next_offset();
}

void unmap(void* data, std::size_t bytes) noexcept {
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(data) % kSpan;
    munmap(static_cast<char*>(data) - offset, bytes + kSpan);
}

}  // namespace branchline
