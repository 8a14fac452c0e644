// Counters are read from other threads while one drives the tree. For ThreadSanitizer.

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "branchline/copy_pages.hpp"
#include "expect.hpp"
#include "random_walk.hpp"

using namespace branchline;

int main() {
    for (uint64_t seed = 1; seed <= 20; ++seed) {
        test::RandomWalk walk(seed);
        std::atomic<bool> done{false};
        std::vector<std::thread> readers;
        for (int i = 0; i < 3; ++i) {
            readers.emplace_back([&] {
                int64_t steps = 0;
                while (!done.load(std::memory_order_relaxed)) {
                    const Counters now = walk.tree().counters();
                    EXPECT(now.steps >= steps);
                    EXPECT(now.pages_free >= 0 && now.pages_free <= now.pages_total);
                    steps = now.steps;
                    std::this_thread::yield();
                }
            });
        }
        for (int i = 0; i < 1500; ++i) walk.operate();
        done.store(true, std::memory_order_relaxed);
        for (std::thread& reader : readers) reader.join();
        walk.finish();
    }
    // Two trees in two threads share nothing.
    std::thread other([] {
        test::RandomWalk walk(100);
        for (int i = 0; i < 1500; ++i) walk.operate();
        walk.finish();
    });
    test::RandomWalk walk(101);
    for (int i = 0; i < 1500; ++i) walk.operate();
    walk.finish();
    other.join();
    std::puts("threads: ok");
}
