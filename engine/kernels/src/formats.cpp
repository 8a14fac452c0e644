#include "branchline/kernels/formats.hpp"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace branchline::kernels {
namespace {

constexpr FormatInfo kFormats[] = {
    {Format::f32, "F32", 1, 4},          {Format::f16, "F16", 1, 2},          {Format::bf16, "BF16", 1, 2},
    {Format::q4_0, "Q4_0", 32, 18},      {Format::q4_1, "Q4_1", 32, 20},      {Format::q5_0, "Q5_0", 32, 22},
    {Format::q5_1, "Q5_1", 32, 24},      {Format::q8_0, "Q8_0", 32, 34},      {Format::q4_k, "Q4_K", 256, 144},
    {Format::q5_k, "Q5_K", 256, 176},    {Format::q6_k, "Q6_K", 256, 210},
};

float read_half(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return half_to_float(half);
}

uint8_t low(uint8_t byte) { return byte & 15; }
uint8_t high(uint8_t byte) { return byte >> 4; }

/// 32 codes of 4 bits: the first half of the columns in the low nibbles, the second in the high ones.
void split_nibbles(const uint8_t* nibbles, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = low(nibbles[i]);
        codes[i + 16] = high(nibbles[i]);
    }
}

/// Adds 16 to each of 32 codes whose bit is set.
void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | ((bits[i / 8] >> (i % 8)) & 1) << 4);
}

/// The 6-bit scale and minimum of one of the eight 32-column parts of a Q4_K or Q5_K block, out of 12 bytes.
void unpack_k_scale(const uint8_t* packed, int part, uint8_t& scale, uint8_t& minimum) {
    if (part < 4) {
        scale = packed[part] & 63;
        minimum = packed[part + 4] & 63;
    } else {
        scale = static_cast<uint8_t>(low(packed[part + 4]) | (packed[part - 4] >> 6) << 4);
        minimum = static_cast<uint8_t>(high(packed[part + 4]) | (packed[part] >> 6) << 4);
    }
}

void decode_k_scales(const uint8_t* block, Codes& out) {
    const float scale = read_half(block);
    const float minimum = read_half(block + 2);
    for (int part = 0; part < 8; ++part) {
        uint8_t s;
        uint8_t m;
        unpack_k_scale(block + 4, part, s, m);
        out.scales[part] = scale * s;
        out.minimums[part] = -(minimum * m);
    }
}

void decode_q4_k(const uint8_t* block, Codes& out) {
    decode_k_scales(block, out);
    const uint8_t* const nibbles = block + 16;
    for (int i = 0; i < 128; ++i) {
        out.codes[i / 32 * 64 + i % 32] = low(nibbles[i]);
        out.codes[i / 32 * 64 + 32 + i % 32] = high(nibbles[i]);
    }
}

void decode_q5_k(const uint8_t* block, Codes& out) {
    decode_k_scales(block, out);
    const uint8_t* const fifth = block + 16;
    const uint8_t* const nibbles = block + 48;
    for (int i = 0; i < 128; ++i) {
        const int pair = i / 32;  // of 32-column parts
        const int bits = fifth[i % 32] >> (2 * pair);
        out.codes[pair * 64 + i % 32] = static_cast<uint8_t>(low(nibbles[i]) | (bits & 1) << 4);
        out.codes[pair * 64 + 32 + i % 32] = static_cast<uint8_t>(high(nibbles[i]) | (bits & 2) << 3);
    }
}

void decode_q6_k(const uint8_t* block, Codes& out) {
    const float scale = read_half(block + 208);
    for (int i = 0; i < 16; ++i) out.scales[i] = scale * static_cast<int8_t>(block[192 + i]);
    for (int half = 0; half < 2; ++half) {
        const uint8_t* const nibbles = block + 64 * half;
        const uint8_t* const upper = block + 128 + 32 * half;
        uint8_t* const codes = out.codes + 128 * half;
        for (int i = 0; i < 32; ++i) {
            codes[i] = static_cast<uint8_t>(low(nibbles[i]) | (upper[i] & 3) << 4);
            codes[i + 32] = static_cast<uint8_t>(low(nibbles[i + 32]) | (upper[i] >> 2 & 3) << 4);
            codes[i + 64] = static_cast<uint8_t>(high(nibbles[i]) | (upper[i] >> 4 & 3) << 4);
            codes[i + 96] = static_cast<uint8_t>(high(nibbles[i + 32]) | (upper[i] >> 6) << 4);
        }
    }
    // Codes are stored with the offset of the 8-bit layout.
    for (uint8_t& code : out.codes) code = static_cast<uint8_t>(code + 128 - 32);
}

}  // namespace

const FormatInfo& info(Format format) { return kFormats[static_cast<int>(format)]; }

Format require_format(std::string_view name) {
    std::string known;
    for (const FormatInfo& f : kFormats) {
        if (f.name == name) return f.format;
        known += (known.empty() ? "" : ", ") + std::string(f.name);
    }
    throw std::invalid_argument("weight format '" + std::string(name) + "' has no kernel: expected one of " + known);
}

void decode_block(Format format, const uint8_t* block, Codes& out) {
    const auto shift = [&](int by) {
        for (int i = 0; i < 32; ++i) out.codes[i] = static_cast<uint8_t>(out.codes[i] + by);
    };
    switch (format) {
        case Format::q4_0:
            out.scales[0] = read_half(block);
            split_nibbles(block + 2, out.codes);
            return;
        case Format::q4_1:
            out.scales[0] = read_half(block);
            out.minimums[0] = read_half(block + 2);
            split_nibbles(block + 4, out.codes);
            return;
        case Format::q5_0:
            out.scales[0] = read_half(block);
            split_nibbles(block + 6, out.codes);
            add_fifth_bits(block + 2, out.codes);
            shift(128 - 16);
            return;
        case Format::q5_1:
            out.scales[0] = read_half(block);
            out.minimums[0] = read_half(block + 2);
            split_nibbles(block + 8, out.codes);
            add_fifth_bits(block + 4, out.codes);
            shift(128);
            return;
        case Format::q8_0:
            out.scales[0] = read_half(block);
            std::memcpy(out.codes, block + 2, 32);
            shift(128);
            return;
        case Format::q4_k:
            return decode_q4_k(block, out);
        case Format::q5_k:
            decode_q5_k(block, out);
            for (uint8_t& code : out.codes) code = static_cast<uint8_t>(code + 128);
            return;
        case Format::q6_k:
            return decode_q6_k(block, out);
        case Format::f32:
        case Format::f16:
        case Format::bf16:
            break;
    }
    throw std::logic_error(std::string(info(format).name) + " has no blocks");
}

float half_to_float(uint16_t half) {
    // Exponent and fraction shifted into place and scaled by 2^(127 - 15); what was infinite or NaN gets its exponent back.
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    if (magnitude >= 0x0f800000u) bits |= 0x7f800000u;
    return std::bit_cast<float>(bits | (half & 0x8000u) << 16);
}

}  // namespace branchline::kernels
