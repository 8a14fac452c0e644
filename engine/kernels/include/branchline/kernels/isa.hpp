// The instruction sets that the kernels are compiled for, and the choice between them at run time.
#pragma once

#include <string_view>
#include <vector>

namespace branchline::kernels {

/// From the least to the most demanding. `baseline` is what every machine of the architecture has (SSE2, Armv8.0 NEON).
enum class Isa {
    baseline,
    avx2,     // AVX2, FMA, F16C
    avx512,   // AVX-512 F, BW, VL, DQ, VNNI and what avx2 has
    dotprod,  // aarch64: NEON with SDOT and UDOT
};

std::string_view name(Isa isa);

/// What this machine has, least demanding first. Never empty.
std::vector<Isa> available_isas();

/// The instruction set of that name. Throws std::invalid_argument if there is none of that name or the machine lacks it.
Isa require_isa(std::string_view name);

/// What the kernels use: the most demanding that the machine has, or what the environment variable BRANCHLINE_ISA names.
/// The variable is read at the first call. Throws std::invalid_argument like `require_isa`.
Isa default_isa();

/// The table of `isa` out of those that the architecture has: `select_isa(isa, baseline::kTable, avx2::kTable, avx512::kTable)`
/// on x86-64, `select_isa(isa, baseline::kTable, dotprod::kTable)` on aarch64, `select_isa(isa, baseline::kTable)` elsewhere.
template <typename Table>
const Table& select_isa([[maybe_unused]] Isa isa, const Table& baseline) {
    return baseline;
}
template <typename Table>
const Table& select_isa(Isa isa, const Table& baseline, const Table& dotprod) {
    return isa == Isa::dotprod ? dotprod : baseline;
}
template <typename Table>
const Table& select_isa(Isa isa, const Table& baseline, const Table& avx2, const Table& avx512) {
    return isa == Isa::avx512 ? avx512 : isa == Isa::avx2 ? avx2 : baseline;
}

}  // namespace branchline::kernels
