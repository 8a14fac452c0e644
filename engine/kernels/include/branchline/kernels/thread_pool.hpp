// The kernels' threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace branchline::kernels {

/// A fixed number of threads, the caller's included, that take the indices of a loop.
///
/// A worker without work spins for a bounded time (about 50 µs, so that the next loop of a step finds it awake) and then
/// sleeps. A loop never waits for a worker that has not started on it: the caller takes whatever indices are left. So the
/// pool also works, on the calling thread alone, in a process that was forked.
class ThreadPool {
  public:
    static constexpr int kMaxThreads = 1024;

    /// Starts num_threads - 1 workers. Throws std::invalid_argument unless 1 <= num_threads <= kMaxThreads.
    explicit ThreadPool(int num_threads);
    /// Waits for the workers to end. No loop may be running.
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    /// Calls fn(index) once for every index in [0, count), on any of the threads in any order, and returns when all calls
    /// have. `fn` must not throw and must not call parallel_for of the same pool. Loops of several callers run one by one.
    template <typename Fn>
    void parallel_for(int64_t count, Fn&& fn) {
        static_assert(std::is_invocable_v<Fn&, int64_t>);
        if (count <= 0) return;
        if (count == 1 || workers_.empty()) {
            for (int64_t i = 0; i < count; ++i) fn(i);
            return;
        }
        run(count, const_cast<void*>(static_cast<const void*>(&fn)), [](void* context, int64_t begin, int64_t end) noexcept {
            auto& call = *static_cast<std::remove_reference_t<Fn>*>(context);
            for (int64_t i = begin; i < end; ++i) call(i);
        });
    }

  private:
    using Range = void (*)(void* context, int64_t begin, int64_t end) noexcept;

    void run(int64_t count, void* context, Range range);
    void take_indices();
    void work();

    std::mutex callers_;  // held by the caller of the running loop

    // The running loop. Written only while `is_open_` is false and `num_inside_` is zero.
    void* context_ = nullptr;
    Range range_ = nullptr;
    int64_t count_ = 0;
    int64_t chunk_ = 1;

    alignas(64) std::atomic<int64_t> next_{0};       // the first index that nobody has taken
    alignas(64) std::atomic<uint32_t> epoch_{0};     // loops started so far; workers sleep on it
    alignas(64) std::atomic<uint32_t> num_inside_{0};  // workers that may be reading the loop
    std::atomic<bool> is_open_{false};
    std::atomic<bool> is_ending_{false};
    std::vector<std::thread> workers_;
};

}  // namespace branchline::kernels
