#include "branchline/kernels/isa.hpp"

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace branchline::kernels {
namespace {

constexpr std::array kAll = {Isa::baseline, Isa::avx2, Isa::avx512, Isa::dotprod};

bool is_available(Isa isa) {
    switch (isa) {
        case Isa::baseline:
            return true;
        case Isa::avx2:
#if defined(__x86_64__)
            // libgcc's check includes that the operating system saves the wide registers.
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
            return false;
#endif
        case Isa::avx512:
#if defined(__x86_64__)
            return is_available(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni");
#else
            return false;
#endif
        case Isa::dotprod:
#if defined(__aarch64__) && defined(__linux__)
            return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
            return false;
#endif
    }
    return false;
}

std::string listed(const std::vector<Isa>& isas) {
    std::string out;
    for (const Isa isa : isas) out += (out.empty() ? "" : ", ") + std::string(name(isa));
    return out;
}

Isa choose() {
    const char* const wanted = std::getenv("BRANCHLINE_ISA");
    return wanted == nullptr || *wanted == '\0' ? available_isas().back() : require_isa(wanted);
}

}  // namespace

std::string_view name(Isa isa) {
    switch (isa) {
        case Isa::baseline:
            return "baseline";
        case Isa::avx2:
            return "avx2";
        case Isa::avx512:
            return "avx512";
        case Isa::dotprod:
            return "dotprod";
    }
    return "?";
}

std::vector<Isa> available_isas() {
    std::vector<Isa> out;
    for (const Isa isa : kAll) {
        if (is_available(isa)) out.push_back(isa);
    }
    return out;
}

Isa require_isa(std::string_view wanted) {
    for (const Isa isa : kAll) {
        if (name(isa) != wanted) continue;
        if (is_available(isa)) return isa;
        throw std::invalid_argument("instruction set " + std::string(wanted) + " is not available on this machine, which has " +
                                    listed(available_isas()));
    }
    throw std::invalid_argument("unknown instruction set '" + std::string(wanted) + "': this machine has " +
                                listed(available_isas()));
}

Isa default_isa() {
    static const Isa chosen = choose();
    return chosen;
}

}  // namespace branchline::kernels
