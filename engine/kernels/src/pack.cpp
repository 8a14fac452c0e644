#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "branchline/kernels/linear.hpp"
#include "layout.hpp"

namespace branchline::kernels {
namespace {

std::string text(int64_t n) { return std::to_string(n); }

/// The place of a code within its block, as an index of bytes of the 8-bit layout.
constexpr int code_index(int row, int col) { return (col / 4 * kRows + row) * 4 + col % 4; }

/// The same for the 4-bit layout: `high` says which half of the byte.
struct Nibble {
    int byte;
    bool high;
};
constexpr Nibble nibble_index(int row, int col) {
    return {(col / 8 * kRows + row) * 4 + col % 4, col / 4 % 2 == 1};
}

template <typename T>
void put(uint8_t* base, int64_t index, T value) {
    std::memcpy(base + index * static_cast<int64_t>(sizeof(T)), &value, sizeof value);
}

template <typename T>
T get(const uint8_t* base, int64_t index) {
    T value;
    std::memcpy(&value, base + index * static_cast<int64_t>(sizeof(T)), sizeof value);
    return value;
}

/// Copies a block's half-precision scale (and minimum, which follows it) as it is.
void copy_halves(Layout layout, const uint8_t* block, uint8_t* scale, uint8_t* minimum) {
    std::memcpy(scale, block, 2);
    if (has_minimum(layout)) std::memcpy(minimum, block + 2, 2);
}

}  // namespace

Layout Matrix::layout() const { return layout_of(format_); }

Precision Matrix::precision() const { return is_dense(layout()) ? Precision::exact : Precision::int8; }

int Matrix::rows_of(int64_t group) const {
    const int64_t end = interleaved_ && group % 2 == 0 ? rows_ / 2 : rows_;
    return static_cast<int>(std::min<int64_t>(kRows, end - first_row(group)));
}

Matrix Matrix::pack(Format format, std::span<const std::span<const uint8_t>> parts, int64_t cols, bool interleave_halves,
                    Arena* arena) {
    const FormatInfo& f = info(format);
    const std::string name(f.name);
    if (cols < 1 || cols % f.block_cols != 0 || cols > (int64_t{1} << 30)) {
        throw std::invalid_argument(name + " weights with " + text(cols) + " columns: expected a positive multiple of " +
                                    text(f.block_cols) + ", at most 2^30");
    }
    const int64_t row_bytes = cols / f.block_cols * f.block_bytes;
    Matrix m;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto bytes = static_cast<int64_t>(parts[i].size());
        if (bytes == 0 || bytes % row_bytes != 0) {
            throw std::invalid_argument("part " + std::to_string(i) + " of the " + name + " weights has " + text(bytes) +
                                        " bytes: expected a positive multiple of " + text(row_bytes) + ", a row of " +
                                        text(cols) + " columns");
        }
        m.rows_ += bytes / row_bytes;
    }
    if (parts.empty()) throw std::invalid_argument("no weights to pack: expected at least one part");
    if (interleave_halves && (parts.size() != 2 || parts[0].size() != parts[1].size())) {
        throw std::invalid_argument("interleaved halves need two parts of as many rows, got " + std::to_string(parts.size()) +
                                    " parts with " + text(m.rows_) + " rows in all");
    }
    m.format_ = format;
    m.interleaved_ = interleave_halves;
    m.cols_ = cols;
    const int64_t half = m.rows_ / 2;
    m.num_groups_ = interleave_halves ? (half + kRows - 1) / kRows * 2 : (m.rows_ + kRows - 1) / kRows;
    m.group_bytes_ = GroupShape(m.layout(), cols).bytes;
    const auto bytes = static_cast<std::size_t>(m.num_groups_ * m.group_bytes_);
    m.buffer_ = arena == nullptr ? allocate(bytes) : arena->take(bytes);
    if (arena != nullptr && arena->is_filled()) return m;
    // Rows that don't exist are zero: they are computed, and dropped.
    for (int64_t g = 0; g < m.num_groups_; ++g) {
        if (m.rows_of(g) < kRows) std::memset(m.buffer_.get() + g * m.group_bytes_, 0, static_cast<std::size_t>(m.group_bytes_));
    }
    int64_t row = 0;
    for (const std::span<const uint8_t> part : parts) {
        for (const uint8_t* p = part.data(); p != part.data() + part.size(); p += row_bytes) m.pack_row(p, row++);
    }
    return m;
}

void Matrix::pack_row(const uint8_t* source, int64_t row) {
    const int64_t half = rows_ / 2;
    const int64_t within = interleaved_ && row >= half ? row - half : row;
    const int64_t group_index = interleaved_ ? within / kRows * 2 + (row >= half ? 1 : 0) : within / kRows;
    const int r = static_cast<int>(within % kRows);
    uint8_t* const base = reinterpret_cast<uint8_t*>(buffer_.get()) + group_index * group_bytes_;
    const Layout l = layout();
    if (is_dense(l)) {
        for (int64_t c = 0; c < cols_; ++c) {
            if (l == Layout::f32) {
                put(base, c * kRows + r, get<uint32_t>(source, c));
            } else {
                put(base, c * kRows + r, get<uint16_t>(source, c));
            }
        }
        return;
    }
    const GroupShape shape(l, cols_);
    const FormatInfo& f = info(format_);
    Codes decoded;
    for (int64_t col = 0; col < cols_; col += f.block_cols, source += f.block_bytes) {
        decode_block(format_, source, decoded);
        for (int64_t in = 0; in < f.block_cols; in += kCols) {
            const int64_t block = (col + in) / kCols;
            uint8_t* const codes = base + block * code_bytes(l);
            for (int c = 0; c < kCols; ++c) {
                const uint8_t code = decoded.codes[in + c];
                if (!is_u4(l)) {
                    codes[code_index(r, c)] = code;
                    continue;
                }
                const auto [byte, high] = nibble_index(r, c);
                codes[byte] = static_cast<uint8_t>(high ? (codes[byte] & 15) | code << 4 : (codes[byte] & 0xf0) | code);
            }
            if (!has_float_scales(l)) {
                copy_halves(l, source, base + shape.scales + (block * kRows + r) * 2, base + shape.minimums + (block * kRows + r) * 2);
                continue;
            }
            const int n = scales_per_block(l);
            for (int s = 0; s < n; ++s) put(base + shape.scales, (block * n + s) * kRows + r, decoded.scales[in / kCols * n + s]);
            if (has_minimum(l)) put(base + shape.minimums, block * kRows + r, decoded.minimums[in / kCols]);
        }
    }
}

void Matrix::row(int64_t index, float* out) const {
    if (index < 0 || index >= rows_) {
        throw std::invalid_argument("row " + text(index) + " of a matrix with " + text(rows_) + " rows");
    }
    const int64_t half = rows_ / 2;
    const int64_t within = interleaved_ && index >= half ? index - half : index;
    const uint8_t* const base = group(interleaved_ ? within / kRows * 2 + (index >= half ? 1 : 0) : within / kRows);
    const int r = static_cast<int>(within % kRows);
    const Layout l = layout();
    const GroupShape shape(l, cols_);
    const auto number = [&](int64_t at, int64_t i) {
        return has_float_scales(l) ? get<float>(base + at, i) : half_to_float(get<uint16_t>(base + at, i));
    };
    for (int64_t c = 0; c < cols_; ++c) {
        if (l == Layout::f32) {
            out[c] = get<float>(base, c * kRows + r);
        } else if (l == Layout::f16) {
            out[c] = half_to_float(get<uint16_t>(base, c * kRows + r));
        } else if (l == Layout::bf16) {
            const uint32_t bits = static_cast<uint32_t>(get<uint16_t>(base, c * kRows + r)) << 16;
            std::memcpy(&out[c], &bits, sizeof bits);
        } else {
            const int64_t block = c / kCols;
            const int in = static_cast<int>(c % kCols);
            const uint8_t* const codes = base + block * code_bytes(l);
            int code;
            if (is_u4(l)) {
                const auto [byte, high] = nibble_index(r, in);
                code = high ? codes[byte] >> 4 : codes[byte] & 15;
            } else {
                code = codes[code_index(r, in)];
            }
            const int n = scales_per_block(l);
            const float scale = number(shape.scales, (block * n + in * n / kCols) * kRows + r);
            const float product = scale * static_cast<float>(code - code_offset(l));
            out[c] = has_minimum(l) ? product + number(shape.minimums, block * kRows + r) : product;
        }
    }
}

}  // namespace branchline::kernels
