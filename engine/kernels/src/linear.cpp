#include "branchline/kernels/linear.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace branchline::kernels {
namespace {

/// Tokens that one unit of work takes: their activations (0.8 KB a token at 1,024 columns) stay in the second-level cache
/// while the rows pass, and the rows of the unit in the first while the tokens pass.
constexpr int64_t kTokensPerUnit = 128;

void require_fit(const Matrix& w, const Activations& x, int64_t stride, Epilogue epilogue) {
    if (x.cols() != w.cols()) {
        throw std::invalid_argument("activations with " + std::to_string(x.cols()) + " columns for weights with " +
                                    std::to_string(w.cols()));
    }
    if (x.precision() == Precision::int8 && is_dense(w.layout())) {
        throw std::invalid_argument(std::string(info(w.format()).name) +
                                    " weights have no 8-bit product: assign the activations with Precision::exact");
    }
    const int64_t columns = epilogue == Epilogue::silu_gate ? w.rows() / 2 : w.rows();
    if (epilogue == Epilogue::silu_gate && !w.has_interleaved_halves()) {
        throw std::invalid_argument("the gate's epilogue needs a matrix that was packed with interleaved halves");
    }
    if (stride < columns) {
        throw std::invalid_argument("rows of the result are " + std::to_string(stride) + " apart and have " +
                                    std::to_string(columns) + " columns");
    }
}

}  // namespace

void multiply(const Matrix& weights, const Activations& x, float* y, int64_t stride, ThreadPool& pool, Epilogue epilogue,
              Isa isa) {
    require_fit(weights, x, stride, epilogue);
    if (x.num_tokens() == 0) return;
    const LinearKernels& kernels = linear_kernels(isa);
    const auto layout = static_cast<int>(weights.layout());
    const GroupKernel kernel =
        x.precision() == Precision::int8 ? kernels.quantised[layout] : kernels.exact[layout];
    const GroupShape shape(weights.layout(), weights.cols());
    const bool gated = epilogue == Epilogue::silu_gate;
    const int64_t row_units = gated ? weights.num_groups() / 2 : weights.num_groups();
    const int64_t token_units = (x.num_tokens() + kTokensPerUnit - 1) / kTokensPerUnit;
    pool.parallel_for(row_units * token_units, [&](int64_t unit) {
        const int64_t first_token = unit / row_units * kTokensPerUnit;
        const int64_t end_token = std::min(first_token + kTokensPerUnit, x.num_tokens());
        const int64_t group = unit % row_units * (gated ? 2 : 1);
        const int rows = weights.rows_of(group);
        alignas(64) float out[kTokens * kRows];
        alignas(64) float up[kTokens * kRows];
        for (int64_t t = first_token; t < end_token; t += kTokens) {
            const int tokens = static_cast<int>(std::min<int64_t>(kTokens, end_token - t));
            float* const to = y + t * stride + weights.first_row(group);
            GroupTask task{weights.group(group), shape, weights.cols(), x.panel(t / kTokens), tokens, out};
            kernel(task);
            if (epilogue == Epilogue::store) {
                kernels.store(out, tokens, rows, to, stride);
            } else if (epilogue == Epilogue::add) {
                kernels.add(out, tokens, rows, to, stride);
            } else {
                task.group = weights.group(group + 1);
                task.out = up;
                kernel(task);
                kernels.silu(out, up, tokens, rows, to, stride);
            }
        }
    });
}

}  // namespace branchline::kernels
