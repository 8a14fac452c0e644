// A number that one thread changes and any thread may read.
#pragma once

#include <atomic>

namespace branchline {

/// Changed by one thread only, so that a change is a plain load and store; readers see some recent value.
template <typename T>
class Gauge {
  public:
    explicit Gauge(T value = 0) : value_(value) {}
    operator T() const { return value_.load(std::memory_order_relaxed); }
    Gauge& operator=(T value) {
        value_.store(value, std::memory_order_relaxed);
        return *this;
    }
    T operator+=(T by) {
        const T value = *this + by;
        *this = value;
        return value;
    }
    T operator-=(T by) {
        const T value = *this - by;
        *this = value;
        return value;
    }

  private:
    std::atomic<T> value_;
};

}  // namespace branchline
