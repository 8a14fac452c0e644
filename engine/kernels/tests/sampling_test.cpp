// Holds sampling on every instruction set that the machine has against plain loops in double, without Python: for machines that
// only an emulator runs. Exits with 1 if something failed.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "branchline/kernels/sampling.hpp"

using namespace branchline::kernels;

namespace {

constexpr int64_t kVocab = 1003;  // the last vector and the last block aren't full

struct Filters {
    float temperature;
    int64_t top_k;
    float top_p;
    float min_p;
};

/// Probabilities after temperature, then top-k, then top-p of what is left, and min-p, from a sorted row.
std::vector<double> plain(const float* logits, const Filters& f) {
    const double most = *std::max_element(logits, logits + kVocab);
    std::vector<double> weights(kVocab);
    for (int64_t i = 0; i < kVocab; ++i) weights[static_cast<size_t>(i)] = std::exp((logits[i] - most) / f.temperature);
    std::vector<double> sorted = weights;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    if (f.top_k > 0) sorted.resize(static_cast<size_t>(f.top_k));
    const double wanted = f.top_p * std::accumulate(sorted.begin(), sorted.end(), 0.0);
    double least = sorted.back(), sum = 0.0;
    for (const double weight : sorted) {
        least = weight;
        sum += weight;
        if (f.top_p < 1.0f && sum >= wanted) break;
    }
    least = std::max(least, static_cast<double>(f.min_p));
    for (double& weight : weights) weight = weight < least * (1 - 1e-6) ? 0.0 : weight;
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (double& weight : weights) weight /= total;
    return weights;
}

/// How many of a few thousand draws don't fall where the running sum of probabilities has their number, within rounding.
int count_wrong(Isa isa, const Filters& f, ThreadPool& threads) {
    constexpr int kRows = 200;
    std::mt19937 rng(5);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    std::vector<float> logits(kRows * kVocab);
    for (float& x : logits) x = normal(rng);
    const std::vector<float> temperature(kRows, f.temperature), top_p(kRows, f.top_p), min_p(kRows, f.min_p);
    const std::vector<int64_t> top_k(kRows, f.top_k);
    std::vector<uint64_t> keys(kRows);
    std::vector<int64_t> positions(kRows);
    std::iota(keys.begin(), keys.end(), 77u);
    std::iota(positions.begin(), positions.end(), 3);
    std::vector<int32_t> tokens(kRows, -1);
    bool is_bad[kRows];
    sample(logits.data(), kVocab, {temperature, top_k, top_p, min_p, keys, positions}, tokens, is_bad, threads, isa);
    int wrong = 0;
    for (size_t row = 0; row < kRows; ++row) {
        const float* const x = &logits[row * kVocab];
        const auto token = static_cast<size_t>(tokens[row]);
        if (f.temperature == 0.0f) {
            wrong += is_bad[row] || token != static_cast<size_t>(std::max_element(x, x + kVocab) - x);
            continue;
        }
        const std::vector<double> probabilities = plain(x, f);
        const double before = std::accumulate(probabilities.begin(), probabilities.begin() + tokens[row], 0.0);
        const double number = uniform(keys[row], static_cast<uint64_t>(positions[row]));
        wrong += is_bad[row] || probabilities[token] == 0.0 || number < before - 1e-5 ||
                 number > before + probabilities[token] + 1e-5;
    }
    return wrong;
}

/// Rows from which no token can be chosen, and the first of equal ones.
int count_wrong_edges(Isa isa, ThreadPool& threads) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr int kRows = 4;
    std::vector<float> logits(kRows * kVocab, -kInfinity);
    logits[kVocab + 999] = std::numeric_limits<float>::quiet_NaN();
    logits[2 * kVocab + 1] = kInfinity;
    logits[3 * kVocab + 700] = logits[3 * kVocab + 1002] = 1.0f;
    const std::vector<float> zeros(kRows, 0.0f), ones(kRows, 1.0f);
    const std::vector<int64_t> none(kRows, 0);
    const std::vector<uint64_t> keys(kRows, 0);
    std::vector<int32_t> tokens(kRows, -1);
    bool is_bad[kRows];
    sample(logits.data(), kVocab, {zeros, none, ones, zeros, keys, none}, tokens, is_bad, threads, isa);
    return !is_bad[0] + !is_bad[1] + !is_bad[2] + is_bad[3] + (tokens[3] != 700);
}

}  // namespace

int main() {
    ThreadPool threads(2);
    int failures = 0;
    const Filters filters[] = {{0.0f, 0, 1.0f, 0.0f}, {1.0f, 0, 1.0f, 0.0f},   {0.5f, 5, 1.0f, 0.0f},   {1.0f, 900, 1.0f, 0.0f},
                               {2.0f, 0, 0.9f, 0.0f}, {1.0f, 0, 0.3f, 0.0f}, {1.0f, 0, 1.0f, 0.05f}, {1.5f, 40, 0.8f, 0.01f}};
    for (const Isa isa : available_isas()) {
        int wrong = count_wrong_edges(isa, threads);
        for (const Filters& each : filters) wrong += count_wrong(isa, each, threads);
        failures += wrong;
        std::printf("%s%s: %d wrong\n", wrong == 0 ? "" : "FAILED: ", std::string(name(isa)).c_str(), wrong);
    }
    return failures == 0 ? 0 : 1;
}
