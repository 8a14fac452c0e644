// A fixed array of plain values, mapped once and zero-filled by the system.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace branchline {

enum class Residence {
    now,     // all of it from the start: no step waits for the system's first touch
    as_used  // only what was touched: for worst cases that never come whole
};

/// Maps `bytes` of zeroed memory. Throws std::bad_alloc.
void* map_zeroed(std::size_t bytes, Residence residence);
void unmap(void* data, std::size_t bytes) noexcept;

template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    Buffer() = default;
    explicit Buffer(std::size_t size, Residence residence = Residence::now)
        : data_(static_cast<T*>(map_zeroed(bytes_of(size), residence))), size_(size) {}
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (data_ != nullptr) unmap(data_, bytes_of(size_));
    }

    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    static std::size_t bytes_of(std::size_t size) { return (size > 0 ? size : 1) * sizeof(T); }

    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace branchline
