// Choosing tokens from rows of logits.
#pragma once

#include <cstdint>
#include <span>

#include "branchline/kernels/isa.hpp"
#include "branchline/kernels/thread_pool.hpp"

namespace branchline::kernels {

/// How each of N rows is sampled; all [N]. As `Sampler` of engine/branchline/engine/model/sampler.py has it.
struct SamplingRows {
    std::span<const float> temperature;  // 0: the likeliest token, the first of equal ones; below 1e-6 as if it were that
    std::span<const int64_t> top_k;      // 0: all
    std::span<const float> top_p;        // 1: all; of the mass that top_k leaves
    std::span<const float> min_p;        // relative to the likeliest token
    std::span<const uint64_t> keys;      // of the rows' random streams
    std::span<const int64_t> positions;  // of the tokens in their streams
};

/// Chooses a token of each row of logits [N, vocab_size]: by inverse of the running sum of probabilities in the order of ids,
/// at the number that the row's stream has at its position.
///
/// A filter keeps the tokens that are at least as likely as the last one that it must keep. No row is sorted: thresholds are
/// selected among the few tokens that can hold them. A row's token depends on that row alone.
/// tokens, is_bad: [N]. is_bad: the row holds NaN or +inf, or nothing above -inf; its token is 0.
void sample(const float* logits, int64_t vocab_size, const SamplingRows& rows, std::span<int32_t> tokens,
            std::span<bool> is_bad, ThreadPool& pool, Isa isa = default_isa());

/// A number in [0, 1) of 53 bits: Philox2x64-10 (Salmon et al. 2011) of counter (position, 0) under the key.
double uniform(uint64_t key, uint64_t position);

}  // namespace branchline::kernels
