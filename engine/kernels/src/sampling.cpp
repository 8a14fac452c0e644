#include "branchline/kernels/sampling.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "sampling_kernels.hpp"

namespace branchline::kernels {
namespace {

constexpr float kMinTemperature = 1e-6f;  // dividing by less could overflow

const SamplingKernels& sampling_kernels(Isa isa) {
#if defined(__x86_64__)
    return select_isa(isa, baseline::kSampling, avx2::kSampling, avx512::kSampling);
#elif defined(__aarch64__)
    return select_isa(isa, baseline::kSampling, dotprod::kSampling);
#else
    return select_isa(isa, baseline::kSampling);
#endif
}

/// One row's weights, relative to that of the likeliest token, which is 1.
class Row {
  public:
    void weigh(const SamplingKernels& kernels, const float* logits, int64_t size, float peak, float temperature) {
        const auto blocks = static_cast<std::size_t>((size + kSampleBlock - 1) / kSampleBlock);
        weights_.resize(blocks * kSampleBlock);
        block_max_.resize(blocks);
        block_sum_.resize(blocks);
        running_.resize(blocks);
        kernels.weigh(logits, size, peak, 1.0f / std::max(temperature, kMinTemperature), weights_.data(), block_max_.data(),
                      block_sum_.data());
    }

    /// The k-th largest weight.
    float kth_largest(std::size_t k) {
        // k blocks whose largest weights are at least this: so are k tokens, and all that are lie in such blocks.
        float floor = 0.0f;
        if (k <= block_max_.size()) {
            candidates_.assign(block_max_.begin(), block_max_.end());
            floor = select(k);
        }
        collect(floor);
        return k <= candidates_.size() ? select(k) : 0.0f;
    }

    /// The smallest weight of the likeliest tokens that together have `share` of the mass of those not below `least`.
    float nucleus(float share, float least) {
        if (least > 0.0f) {
            collect(least);
            return lightest_of_heaviest(share * mass());
        }
        const double wanted = share * std::accumulate(block_sum_.begin(), block_sum_.end(), 0.0);
        for (const double floor : {1e-3, 1e-5, 0.0}) {
            collect(static_cast<float>(floor * wanted));
            if (mass() >= wanted) break;
        }
        return lightest_of_heaviest(wanted);
    }

    /// The token at which the running sum of weights that aren't below `least` passes `number` of their total.
    int64_t draw(float least, double number) {
        double total = 0.0;
        std::size_t last = 0;
        for (std::size_t b = 0; b < running_.size(); ++b) {
            if (block_max_[b] >= least && block_max_[b] > 0.0f) {
                last = b;
                total += least > 0.0f ? mass_of(b, least) : static_cast<double>(block_sum_[b]);
            }
            running_[b] = total;
        }
        const double target = number * total;
        const auto passed = std::upper_bound(running_.begin(), running_.end(), target);
        // Rounding must not carry it past the last token that counts, neither of the row nor of the block.
        const std::size_t block = std::min(static_cast<std::size_t>(passed - running_.begin()), last);
        double sum = block == 0 ? 0.0 : running_[block - 1];
        std::size_t chosen = 0;
        for (std::size_t i = block * kSampleBlock; i < (block + 1) * kSampleBlock; ++i) {
            if (weights_[i] < least || weights_[i] <= 0.0f) continue;
            chosen = i;
            sum += static_cast<double>(weights_[i]);
            if (sum > target) break;
        }
        return static_cast<int64_t>(chosen);
    }

  private:
    double mass_of(std::size_t block, float least) const {
        double sum = 0.0;
        for (std::size_t i = block * kSampleBlock; i < (block + 1) * kSampleBlock; ++i)
            sum += weights_[i] >= least ? static_cast<double>(weights_[i]) : 0.0;
        return sum;
    }

    double mass() const { return std::accumulate(candidates_.begin(), candidates_.end(), 0.0); }

    /// candidates_ = all weights that aren't below `floor`.
    void collect(float floor) {
        candidates_.resize(weights_.size());
        std::size_t count = 0;
        for (std::size_t b = 0; b < block_max_.size(); ++b) {
            if (block_max_[b] < floor) continue;
            for (std::size_t i = b * kSampleBlock; i < (b + 1) * kSampleBlock; ++i) {
                candidates_[count] = weights_[i];
                count += weights_[i] >= floor ? 1 : 0;
            }
        }
        candidates_.resize(count);
    }

    float select(std::size_t k) {
        const auto at = candidates_.begin() + static_cast<std::ptrdiff_t>(k) - 1;
        std::nth_element(candidates_.begin(), at, candidates_.end(), std::greater<>());
        return *at;
    }

    /// The last candidate of the fewest, heaviest first, that together weigh `wanted`: quickselect by mass.
    float lightest_of_heaviest(double wanted) {
        constexpr std::ptrdiff_t kFew = 32;
        auto begin = candidates_.begin(), end = candidates_.end();
        double above = 0.0;
        while (end - begin > kFew) {
            const float first = *begin, middle = begin[(end - begin) / 2], last = end[-1];
            const float pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
            const auto middle_begin = std::partition(begin, end, [pivot](float w) { return w > pivot; });
            const double heavier = std::accumulate(begin, middle_begin, 0.0);
            if (middle_begin != begin && above + heavier >= wanted) {
                end = middle_begin;
                continue;
            }
            const auto middle_end = std::partition(middle_begin, end, [pivot](float w) { return w >= pivot; });
            above += heavier + static_cast<double>(middle_end - middle_begin) * static_cast<double>(pivot);
            if (above >= wanted || middle_end == end) return pivot;
            begin = middle_end;
        }
        std::sort(begin, end, std::greater<>());
        for (auto at = begin; at != end; ++at) {
            above += static_cast<double>(*at);
            if (above >= wanted) return *at;
        }
        return end[-1];
    }

    std::vector<float> weights_;
    std::vector<float> block_max_;
    std::vector<float> block_sum_;
    std::vector<double> running_;
    std::vector<float> candidates_;
};

}  // namespace

void sample(const float* logits, int64_t vocab_size, const SamplingRows& rows, std::span<int32_t> tokens,
            std::span<bool> is_bad, ThreadPool& pool, Isa isa) {
    const std::size_t count = tokens.size();
    for (const std::size_t size : {rows.temperature.size(), rows.top_k.size(), rows.top_p.size(), rows.min_p.size(),
                                   rows.keys.size(), rows.positions.size(), is_bad.size()}) {
        if (size == count) continue;
        throw std::invalid_argument("the parameters of " + std::to_string(size) + " rows for " + std::to_string(count) +
                                    " tokens");
    }
    const SamplingKernels& kernels = sampling_kernels(isa);
    pool.parallel_for(static_cast<int64_t>(count), [&](int64_t index) {
        thread_local Row row;  // keeps its memory from step to step
        const auto i = static_cast<std::size_t>(index);
        const float* const x = logits + index * vocab_size;
        float peak = 0.0f;
        int64_t token = 0;
        is_bad[i] = !kernels.peak(x, vocab_size, &peak, &token);
        if (!is_bad[i] && rows.temperature[i] > 0.0f) {
            row.weigh(kernels, x, vocab_size, peak, rows.temperature[i]);
            float least = 0.0f;
            const int64_t k = rows.top_k[i];
            if (k > 0 && k < vocab_size) least = row.kth_largest(static_cast<std::size_t>(k));
            if (rows.top_p[i] < 1.0f) least = std::max(least, row.nucleus(rows.top_p[i], least));
            token = row.draw(std::max(least, rows.min_p[i]), uniform(rows.keys[i], static_cast<uint64_t>(rows.positions[i])));
        }
        tokens[i] = static_cast<int32_t>(token);
    });
}

double uniform(uint64_t key, uint64_t position) {
    uint64_t low = position, high = 0;
    for (int round = 0; round < 10; ++round) {
        const auto product = static_cast<unsigned __int128>(low) * 0xD2B74407B1CE6E93u;
        low = static_cast<uint64_t>(product >> 64) ^ key ^ high;
        high = static_cast<uint64_t>(product);
        key += 0x9E3779B97F4A7C15u;
    }
    return static_cast<double>(low >> 11) * 0x1p-53;
}

}  // namespace branchline::kernels
