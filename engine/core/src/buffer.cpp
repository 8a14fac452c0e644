#include "branchline/buffer.hpp"

#include <new>
#include <sys/mman.h>

namespace branchline {

void* map_zeroed(std::size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return data;
}

void unmap(void* data, std::size_t bytes) noexcept { munmap(data, bytes); }

}  // namespace branchline
