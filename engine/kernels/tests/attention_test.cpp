// Holds tree attention on every instruction set that the machine has against plain loops in double, without Python: for
// machines that only an emulator runs. Exits with 1 if something failed.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "branchline/kernels/attention.hpp"

using namespace branchline::kernels;

namespace {

constexpr int kGroup = 3;
constexpr int kKvHeads = 2;
constexpr int kHeads = kGroup * kKvHeads;
constexpr int kShared = 600;  // tokens that all branches see: two splits, and a page that isn't full
constexpr int kBranches = 5;

struct Tokens {
    std::vector<float> q, k, v;

    Tokens(int count, int head_dim, std::mt19937& rng) {
        std::normal_distribution<float> normal;
        for (auto* part : {&q, &k, &v}) {
            part->resize(static_cast<size_t>(count * head_dim * (part == &q ? kHeads : kKvHeads)));
            for (float& x : *part) x = normal(rng);
        }
    }
};

/// Softmax attention of one query head to the first `num_shared` shared tokens and, after them, maybe to a branch's own.
std::vector<double> plain(const Tokens& shared, int num_shared, const Tokens* own, int branch, const float* q, int kv_head,
                          int head_dim, float scale) {
    std::vector<const float*> keys, values;
    for (int t = 0; t < num_shared; ++t) {
        keys.push_back(&shared.k[static_cast<size_t>((t * kKvHeads + kv_head) * head_dim)]);
        values.push_back(&shared.v[static_cast<size_t>((t * kKvHeads + kv_head) * head_dim)]);
    }
    if (own != nullptr) {
        keys.push_back(&own->k[static_cast<size_t>((branch * kKvHeads + kv_head) * head_dim)]);
        values.push_back(&own->v[static_cast<size_t>((branch * kKvHeads + kv_head) * head_dim)]);
    }
    std::vector<double> weights;
    for (const float* key : keys) {
        double score = 0;
        for (int d = 0; d < head_dim; ++d) score += static_cast<double>(q[d]) * key[d];
        weights.push_back(score * scale);
    }
    const double most = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& w : weights) sum += w = std::exp(w - most);
    std::vector<double> out(static_cast<size_t>(head_dim));
    for (size_t t = 0; t < weights.size(); ++t)
        for (int d = 0; d < head_dim; ++d) out[static_cast<size_t>(d)] += weights[t] / sum * values[t][d];
    return out;
}

/// Prefills the shared tokens in two chunks, then decodes one token of every branch. Returns the largest error.
double largest_error(const std::string& isa, KvType type, int head_dim, ThreadPool& threads) {
    std::mt19937 rng(3);
    const Tokens shared(kShared, head_dim, rng), own(kBranches, head_dim, rng);
    const AttentionShape shape{.num_layers = 2,
                               .num_heads = kHeads,
                               .num_kv_heads = kKvHeads,
                               .head_dim = head_dim,
                               .page_tokens = 16,
                               .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
                               .kv_type = type};
    TreeAttention attention(shape, isa);
    constexpr int kSharedPages = (kShared + 15) / 16;
    constexpr int kPages = kSharedPages + kBranches;
    // All ones: not a number in either type.
    std::vector<std::byte> pool(static_cast<size_t>(kPages * shape.page_bytes()), std::byte{0xff});
    std::vector<int32_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), rng);

    const int q_stride = kHeads * head_dim, kv_stride = kKvHeads * head_dim, layer = 1;
    std::vector<float> out(static_cast<size_t>(kShared * q_stride));
    double error = 0;
    const auto compare = [&](const float* got, const Tokens& of, int token, int num_shared, const Tokens* tail) {
        for (int head = 0; head < kHeads; ++head) {
            const float* q = &of.q[static_cast<size_t>(token * q_stride + head * head_dim)];
            const auto expected = plain(shared, num_shared, tail, token, q, head / kGroup, head_dim, shape.scale);
            for (int d = 0; d < head_dim; ++d) {
                const double off = std::fabs(got[head * head_dim + d] - expected[static_cast<size_t>(d)]);
                error = off <= error ? error : std::isnan(off) ? std::numeric_limits<double>::infinity() : off;
            }
        }
    };

    for (int begin = 0, end = 217; begin < kShared; begin = end, end = kShared) {
        std::vector<int32_t> slots;
        for (int t = begin; t < end; ++t) slots.push_back(pages[static_cast<size_t>(t / 16)] * 16 + t % 16);
        const std::vector<int32_t> rows = {0, end - begin}, table = {0, (end + 15) / 16}, last = {(end - 1) % 16 + 1};
        const AttentionLevel level{rows, table, pages, last};
        attention.plan(slots, rows, {&level, 1}, kPages);
        attention.attend(layer, &shared.q[static_cast<size_t>(begin * q_stride)], q_stride,
                         &shared.k[static_cast<size_t>(begin * kv_stride)], &shared.v[static_cast<size_t>(begin * kv_stride)],
                         kv_stride, out.data(), q_stride, pool.data(), threads);
        for (int t = begin; t < end; ++t)
            if (t % 7 == 0 || t < begin + 2 || t >= end - 2)
                compare(&out[static_cast<size_t>((t - begin) * q_stride)], shared, t, t + 1, nullptr);
    }

    std::vector<int32_t> rows(kBranches + 1), slots, tails;
    std::iota(rows.begin(), rows.end(), 0);
    for (int b = 0; b < kBranches; ++b) {
        tails.push_back(pages[static_cast<size_t>(kSharedPages + b)]);
        slots.push_back(tails.back() * 16);
    }
    const std::vector<int32_t> all = {0, kBranches}, table = {0, kSharedPages}, last = {(kShared - 1) % 16 + 1};
    const std::vector<int32_t> ones(kBranches, 1);
    const AttentionLevel levels[] = {{all, table, pages, last}, {rows, rows, tails, ones}};
    attention.plan(slots, rows, levels, kPages);
    attention.attend(layer, own.q.data(), q_stride, own.k.data(), own.v.data(), kv_stride, out.data(), q_stride, pool.data(),
                     threads);
    for (int b = 0; b < kBranches; ++b) compare(&out[static_cast<size_t>(b * q_stride)], own, b, kShared, &own);
    return error;
}

}  // namespace

int main() {
    ThreadPool threads(2);
    int failures = 0;
    for (const std::string& isa : attention_isas()) {
        for (const KvType type : {KvType::float32, KvType::bfloat16, KvType::int8}) {
            for (const int head_dim : {24, 64, 128}) {
                const double error = largest_error(isa, type, head_dim, threads);
                const bool holds = error <= (type == KvType::float32 ? 1e-5 : 2e-2);
                failures += !holds;
                std::printf("%s%s, %s, head_dim %d: largest error %.2g\n", holds ? "" : "FAILED: ", isa.c_str(),
                            type == KvType::float32    ? "float32"
                            : type == KvType::bfloat16 ? "bfloat16"
                                                       : "int8",
                            head_dim, error);
            }
        }
    }
    return failures == 0 ? 0 : 1;
}
