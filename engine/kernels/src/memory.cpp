#include "branchline/kernels/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <numeric>
#include <stdexcept>
#include <system_error>

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
#if defined(MADV_HUGEPAGE)
    // Advice: where it isn't taken, only speed suffers.
    if (alignment == kHugePage) (void)madvise(memory.get(), size, MADV_HUGEPAGE);
#endif
    return memory;
}

Arena::Arena(const std::string& path, std::size_t bytes) : left_(bytes), is_filled_(true) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw std::system_error(errno, std::generic_category(), path);
    void* const memory = bytes == 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
    const int error = bytes == 0 ? EINVAL : errno;
    close(file);
    if (memory == MAP_FAILED) throw std::system_error(error, std::generic_category(), path);
    chunk_ = {static_cast<std::byte*>(memory), [bytes](std::byte* p) { (void)munmap(p, bytes); }};
}

std::shared_ptr<std::byte> Arena::take(std::size_t bytes) {
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kLine);
    const std::lock_guard lock(mutex_);
    if (is_filled_ && size > left_) {
        throw std::invalid_argument("the mapped file has " + std::to_string(left_) + " bytes left, not " + std::to_string(size) +
                                    ": other matrices were packed into it");
    }
    std::shared_ptr<std::byte> out;
    if (!is_filled_ && size > kChunk / 2) {
        out = allocate(size);
    } else {
        if (size > left_) {
            chunk_ = allocate(kChunk);
            left_ = kChunk;
            used_ = 0;
        }
        out = {chunk_, chunk_.get() + used_};
        used_ += size;
        left_ -= size;
    }
    taken_.emplace_back(out, size);
    return out;
}

int64_t Arena::num_bytes() const {
    const std::lock_guard lock(mutex_);
    return std::accumulate(taken_.begin(), taken_.end(), int64_t{0},
                           [](int64_t sum, const auto& block) { return sum + static_cast<int64_t>(block.second); });
}

std::vector<std::span<const std::byte>> Arena::blocks() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::span<const std::byte>> out;
    out.reserve(taken_.size());
    for (const auto& [memory, size] : taken_) out.emplace_back(memory.get(), size);
    return out;
}

}  // namespace branchline::kernels
