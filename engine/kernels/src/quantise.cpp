#include "branchline/kernels/quantise.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace branchline::kernels {

void Activations::assign(const float* x, int64_t num_tokens, int64_t cols, int64_t stride, Precision precision,
                         ThreadPool& pool, Isa isa) {
    if (num_tokens < 0 || cols < 1 || stride < cols) {
        throw std::invalid_argument("activations of " + std::to_string(num_tokens) + " tokens x " + std::to_string(cols) +
                                    " columns, " + std::to_string(stride) +
                                    " apart: expected no negative number, a column, and rows that don't overlap");
    }
    if (precision == Precision::int8 && cols % kCols != 0) {
        throw std::invalid_argument("8-bit activations with " + std::to_string(cols) + " columns: expected a multiple of " +
                                    std::to_string(kCols));
    }
    const int64_t panels = (num_tokens + kTokens - 1) / kTokens;
    const int64_t panel_bytes = precision == Precision::int8 ? cols / kCols * static_cast<int64_t>(sizeof(PanelBlock))
                                                             : cols * kTokens * static_cast<int64_t>(sizeof(float));
    const auto bytes = static_cast<std::size_t>(panels * panel_bytes);
    if (bytes > capacity_) {
        buffer_ = allocate(bytes);
        capacity_ = bytes;
    }
    num_tokens_ = num_tokens;
    cols_ = cols;
    panel_bytes_ = panel_bytes;
    precision_ = precision;
    const LinearKernels& kernels = linear_kernels(isa);
    pool.parallel_for(panels, [&](int64_t p) {
        const int tokens = static_cast<int>(std::min<int64_t>(kTokens, num_tokens - p * kTokens));
        const float* const first = x + p * kTokens * stride;
        std::byte* const out = buffer_.get() + p * panel_bytes;
        if (precision == Precision::int8) {
            kernels.quantise(first, stride, tokens, cols, reinterpret_cast<PanelBlock*>(out));
            return;
        }
        auto* const floats = reinterpret_cast<float*>(out);
        for (int64_t c = 0; c < cols; ++c) {
            for (int t = 0; t < kTokens; ++t) floats[c * kTokens + t] = t < tokens ? first[t * stride + c] : 0.0f;
        }
    });
}

}  // namespace branchline::kernels
