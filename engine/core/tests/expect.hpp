// The least that a test needs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace branchline::test {

/// Ends the process with a message, so that a sanitizer's or a debugger's stack is where it went wrong.
inline void expect(bool ok, const std::string& what, const char* file, int line) {
    if (ok) return;
    std::fprintf(stderr, "%s:%d: expected %s\n", file, line, what.c_str());
    std::abort();
}

/// Calls `call`, which must throw an Error. Returns its text.
template <typename Error, typename Call>
std::string thrown(Call call, const char* file, int line) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    expect(false, "an error", file, line);
    return {};
}

}  // namespace branchline::test

#define EXPECT(...) ::branchline::test::expect(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
#define EXPECT_THROWS(Error, ...) ::branchline::test::thrown<Error>([&] { __VA_ARGS__; }, __FILE__, __LINE__)
