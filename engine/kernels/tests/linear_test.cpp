// Holds the kernels of every instruction set that the machine has against plain loops, without Python: for machines that only
// an emulator runs. Exits with 1 if something failed.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "branchline/kernels/linear.hpp"

using namespace branchline::kernels;

namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
    if (ok) return;
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
}

/// Random blocks whose half-precision scales are normal numbers.
std::vector<uint8_t> make_weights(Format format, int64_t rows, int64_t cols, std::mt19937& rng) {
    const FormatInfo& f = info(format);
    std::vector<uint8_t> bytes(static_cast<std::size_t>(rows * cols / f.block_cols * f.block_bytes));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
    for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(f.block_bytes)) {
        const auto number = static_cast<uint16_t>(0x2000 | (rng() & 0x83ff));  // ±2^-7 to 2^-6
        if (f.block_cols > 1) {
            std::memcpy(&bytes[at], &number, 2);
            std::memcpy(&bytes[at + 2], &number, 2);
            if (format == Format::q6_k) std::memcpy(&bytes[at + 208], &number, 2);
        } else {
            const auto wide = static_cast<uint16_t>(0x3c00 | (rng() & 0x83ff));
            std::memcpy(&bytes[at + static_cast<std::size_t>(f.block_bytes) - 2], &wide, 2);
        }
    }
    return bytes;
}

/// x as 8-bit activations are taken.
std::vector<double> rounded(const std::vector<float>& x) {
    std::vector<double> out(x.size());
    for (std::size_t b = 0; b < x.size(); b += 32) {
        float most = 0;
        for (std::size_t i = b; i < b + 32; ++i) most = std::max(most, std::fabs(x[i]));
        const float scale = most / 127.0f;
        for (std::size_t i = b; i < b + 32; ++i) out[i] = static_cast<double>(std::nearbyint(x[i] * (1.0f / scale))) * scale;
    }
    return out;
}

void test_products(Isa isa, Format format, ThreadPool& pool) {
    constexpr int64_t kRows = 37;
    constexpr int64_t kCols = 512;
    constexpr int64_t kTokens = 21;
    std::mt19937 rng(7);
    const std::vector<uint8_t> bytes = make_weights(format, kRows, kCols, rng);
    const std::span<const uint8_t> part(bytes);
    const Matrix weights = Matrix::pack(format, {&part, 1}, kCols);
    std::vector<float> plain(kRows * kCols);
    for (int64_t r = 0; r < kRows; ++r) weights.row(r, &plain[static_cast<std::size_t>(r * kCols)]);
    std::vector<float> x(kTokens * kCols);
    std::normal_distribution<float> normal;
    for (float& v : x) v = normal(rng);
    for (const Precision precision : {Precision::int8, Precision::exact}) {
        if (precision == Precision::int8 && weights.precision() == Precision::exact) continue;
        const std::vector<double> taken =
            precision == Precision::int8 ? rounded(x) : std::vector<double>(x.begin(), x.end());
        Activations activations;
        activations.assign(x.data(), kTokens, kCols, kCols, precision, pool, isa);
        std::vector<float> y(kTokens * kRows, -1.0f);
        multiply(weights, activations, y.data(), kRows, pool, Epilogue::store, isa);
        double error = 0;
        double size = 0;
        for (int64_t t = 0; t < kTokens; ++t) {
            for (int64_t r = 0; r < kRows; ++r) {
                double want = 0;
                for (int64_t c = 0; c < kCols; ++c) {
                    want += taken[static_cast<std::size_t>(t * kCols + c)] * plain[static_cast<std::size_t>(r * kCols + c)];
                }
                error += std::pow(y[static_cast<std::size_t>(t * kRows + r)] - want, 2);
                size += want * want;
            }
        }
        const std::string what = std::string(name(isa)) + " " + std::string(info(format).name) +
                                 (precision == Precision::int8 ? " int8" : " exact") + ": relative error " +
                                 std::to_string(std::sqrt(error / size));
        expect(std::sqrt(error / size) < 1e-5, what);
        for (int64_t t = 0; t < kTokens; ++t) {
            activations.assign(&x[static_cast<std::size_t>(t * kCols)], 1, kCols, kCols, precision, pool, isa);
            std::vector<float> alone(kRows);
            multiply(weights, activations, alone.data(), kRows, pool, Epilogue::store, isa);
            expect(std::memcmp(alone.data(), &y[static_cast<std::size_t>(t * kRows)], kRows * sizeof(float)) == 0,
                   what + ", token " + std::to_string(t) + " depends on the others");
        }
    }
}

void test_pool() {
    for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        for (int64_t count : {0, 1, 2, 3, 63, 64, 1000}) {
            for (int round = 0; round < 50; ++round) {
                std::vector<int> calls(static_cast<std::size_t>(count));
                pool.parallel_for(count, [&](int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
                for (const int c : calls) expect(c == 1, "an index was called " + std::to_string(c) + " times");
            }
        }
    }
}

}  // namespace

int main() {
    test_pool();
    ThreadPool pool(2);
    for (const Isa isa : available_isas()) {
        for (const Format format : {Format::f32, Format::f16, Format::bf16, Format::q4_0, Format::q4_1, Format::q5_0,
                                    Format::q5_1, Format::q8_0, Format::q4_k, Format::q5_k, Format::q6_k}) {
            test_products(isa, format, pool);
        }
        std::printf("%s: done\n", std::string(name(isa)).c_str());
    }
    return failures == 0 ? 0 : 1;
}
