// The right-hand side of a linear layer, prepared once for all matrices that share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "branchline/kernels/isa.hpp"
#include "branchline/kernels/memory.hpp"
#include "branchline/kernels/thread_pool.hpp"

namespace branchline::kernels {

enum class Precision {
    int8,   // 8 bits and a float scale for each 32 columns: for quantised weights
    exact,  // floats: for dense weights, and for quantised ones where speed doesn't matter
};

/// The inputs of several tokens. Filled again and again; memory grows to the largest that was asked for.
class Activations {
  public:
    /// Takes x[t * stride + c], t < num_tokens, c < cols. Copies it.
    ///
    /// At Precision::int8, each 32 columns become codes in [-127, 127], rounded to the nearest (ties to even), and the scale
    /// max|x| / 127. A block with an infinity or a NaN gets the scale NaN, so that every result that depends on it is NaN.
    /// Throws std::invalid_argument if num_tokens < 0, cols < 1, or for int8 if cols isn't a multiple of 32.
    void assign(const float* x, int64_t num_tokens, int64_t cols, int64_t stride, Precision precision, ThreadPool& pool,
                Isa isa = default_isa());

    int64_t num_tokens() const { return num_tokens_; }
    int64_t cols() const { return cols_; }
    Precision precision() const { return precision_; }
    /// Of 16 tokens: PanelBlock[cols / 32] or float[cols][16].
    const std::byte* panel(int64_t index) const { return buffer_.get() + index * panel_bytes_; }

  private:
    std::unique_ptr<std::byte, void (*)(void*)> buffer_{nullptr, std::free};
    std::size_t capacity_ = 0;
    int64_t num_tokens_ = 0;
    int64_t cols_ = 0;
    int64_t panel_bytes_ = 0;
    Precision precision_ = Precision::int8;
};

}  // namespace branchline::kernels
