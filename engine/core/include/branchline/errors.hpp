// The core's errors. `bind/` maps each to the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace branchline {

struct CoreError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct ReleasedHandleError : CoreError {
    using CoreError::CoreError;
};

struct OutOfPagesError : CoreError {
    using CoreError::CoreError;
};

struct OutOfBranchesError : CoreError {
    using CoreError::CoreError;
};

struct BatchError : CoreError {
    using CoreError::CoreError;
};

}  // namespace branchline
