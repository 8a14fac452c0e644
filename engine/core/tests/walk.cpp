// walk OPERATIONS [SEED]: so many random operations, in walks of 2,000.

#include <cstdio>
#include <cstdlib>

#include "random_walk.hpp"

int main(int argc, char** argv) {
    const long long operations = argc > 1 ? std::atoll(argv[1]) : 100000;
    const unsigned long long first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    constexpr long long kWalk = 2000;
    for (long long w = 0; w * kWalk < operations; ++w) {
        const unsigned long long seed = first + static_cast<unsigned long long>(w);
        if (w % 100 == 0) {
            std::printf("walk %lld, seed %llu\n", w, seed);
            std::fflush(stdout);
        }
        branchline::test::RandomWalk walk(seed);
        for (long long i = 0; i < kWalk; ++i) {
            walk.operate();
            if (i % 50 == 0) walk.verify();
        }
        walk.finish();
    }
    std::printf("%lld operations\n", operations);
}
