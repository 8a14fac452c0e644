// Linear layers on weights as the file has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "branchline/kernels/formats.hpp"
#include "branchline/kernels/memory.hpp"
#include "branchline/kernels/quantise.hpp"

namespace branchline::kernels {

enum class Layout;

/// A weight matrix, repacked once for the kernels. Immutable, so any number of threads may read it.
class Matrix {
  public:
    /// Packs `parts`, each the bytes of whole rows of `cols` columns, one below the other.
    ///
    /// `interleave_halves`: the parts are two of as many rows, gate and up; their groups of 16 rows alternate, which
    /// Epilogue::silu_gate needs. It changes nothing else: rows keep their numbers.
    /// `arena`: where the weights go, so that small matrices share huge pages; none: memory of their own.
    /// Copies. Throws std::invalid_argument if `cols` isn't a multiple of the format's block (for quantised formats: 32 or
    /// 256), if a part isn't a whole number of rows, if there is no row, or if halves differ.
    static Matrix pack(Format format, std::span<const std::span<const uint8_t>> parts, int64_t cols,
                       bool interleave_halves = false, Arena* arena = nullptr);

    Format format() const { return format_; }
    int64_t rows() const { return rows_; }
    int64_t cols() const { return cols_; }
    bool has_interleaved_halves() const { return interleaved_; }
    /// What `multiply` is fastest with: int8 for quantised formats, exact for the dense ones.
    Precision precision() const;
    /// Memory that it takes.
    int64_t num_bytes() const { return num_groups_ * group_bytes_; }

    /// Writes row `index` as floats, as the reference decoder of the format gives them: the look-up of an embedding that is
    /// tied to the head. Throws std::invalid_argument if there is no such row.
    void row(int64_t index, float* out) const;

    // For the kernels.
    Layout layout() const;
    int64_t num_groups() const { return num_groups_; }
    const uint8_t* group(int64_t index) const {
        return reinterpret_cast<const uint8_t*>(buffer_.get()) + index * group_bytes_;
    }
    /// The first row of a group, and how many of its 16 rows exist.
    int64_t first_row(int64_t group) const {
        return interleaved_ ? group / 2 * 16 + group % 2 * (rows_ / 2) : group * 16;
    }
    int rows_of(int64_t group) const;

  private:
    Matrix() = default;
    void pack_row(const uint8_t* source, int64_t row);

    std::shared_ptr<std::byte> buffer_;
    Format format_ = Format::f32;
    bool interleaved_ = false;
    int64_t rows_ = 0;
    int64_t cols_ = 0;
    int64_t num_groups_ = 0;
    int64_t group_bytes_ = 0;
};

enum class Epilogue {
    store,      // y = x Wᵀ
    add,        // y += x Wᵀ
    silu_gate,  // y = silu(x Gᵀ) * (x Uᵀ) with rows() / 2 columns; needs interleaved halves
};

/// Applies `weights` to every token of `x` and writes y[t * stride + r].
///
/// A token's results depend on nothing but its own x: not on the other tokens, their number, or the threads. They may differ
/// in the last bits between instruction sets.
/// Throws std::invalid_argument if the columns differ, if x is int8 and the weights are dense, if `stride` is less than the
/// columns of y, or if the epilogue doesn't fit the packing.
void multiply(const Matrix& weights, const Activations& x, float* y, int64_t stride, ThreadPool& pool,
              Epilogue epilogue = Epilogue::store, Isa isa = default_isa());

}  // namespace branchline::kernels
