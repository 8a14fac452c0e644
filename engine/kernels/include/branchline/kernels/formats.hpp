// How weights lie in the files that are read: GGUF's block formats and plain numbers.
#pragma once

#include <cstdint>
#include <string_view>

namespace branchline::kernels {

enum class Format { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

struct FormatInfo {
    Format format;
    std::string_view name;  // as GGUF spells it: "Q4_1", "Q4_K", "BF16"
    int64_t block_cols;     // columns that one block holds
    int64_t block_bytes;
};

const FormatInfo& info(Format format);

/// The format that GGUF calls `name`. Throws std::invalid_argument with the known names if there is none.
Format require_format(std::string_view name);

/// Part of one row: value = scales[c / scale_cols] * (codes[c] - offset) + minimums[c / 32], each step rounded to float.
///
/// The same numbers, rounded the same way, as the reference decoders of GGML give.
struct Codes {
    static constexpr int kMaxCols = 256;
    uint8_t codes[kMaxCols];
    float scales[kMaxCols / 16];
    float minimums[kMaxCols / 32];
};

/// Decodes one block of a quantised format. What the format lacks (minimums) is left as it was.
void decode_block(Format format, const uint8_t* block, Codes& out);

float half_to_float(uint16_t half);

}  // namespace branchline::kernels
