#include "branchline/kernels/thread_pool.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace branchline::kernels {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// Returns once `variable` is no longer `old`: spins for a bounded time, then sleeps until it is notified.
void wait_while(const std::atomic<uint32_t>& variable, uint32_t old) {
    const auto give_up = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (variable.load(std::memory_order_acquire) != old) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < give_up);
    variable.wait(old);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    if (num_threads < 1 || num_threads > kMaxThreads) {
        throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + ": expected 1 to " +
                                    std::to_string(kMaxThreads));
    }
    workers_.reserve(static_cast<std::size_t>(num_threads - 1));
    try {
        for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
        is_ending_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    is_ending_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t count, void* context, Range range) {
    const std::lock_guard lock(callers_);
    context_ = context;
    range_ = range;
    count_ = count;
    // Small enough that a thread that lost its core in the middle of a chunk holds up little.
    chunk_ = std::max<int64_t>(1, count / (int64_t{8} * num_threads()));
    next_.store(0, std::memory_order_relaxed);
    is_open_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    take_indices();
    // A worker counts itself before it looks whether the loop is open, and the loop is closed before the count is read (all
    // sequentially consistent): one that is not counted here finds it closed, and touches nothing.
    is_open_.store(false);
    for (uint32_t inside = num_inside_.load(); inside != 0; inside = num_inside_.load()) wait_while(num_inside_, inside);
}

void ThreadPool::take_indices() {
    for (;;) {
        const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
        if (begin >= count_) return;
        range_(context_, begin, std::min(begin + chunk_, count_));
    }
}

void ThreadPool::work() {
    uint32_t seen = 0;
    for (;;) {
        wait_while(epoch_, seen);
        seen = epoch_.load();
        if (is_ending_.load()) return;
        num_inside_.fetch_add(1);
        if (is_open_.load()) take_indices();
        num_inside_.fetch_sub(1);
        num_inside_.notify_all();
    }
}

}  // namespace branchline::kernels
