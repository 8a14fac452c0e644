#!/bin/sh
# Build the core's tests with AddressSanitizer and UBSan, then with ThreadSanitizer, and run them. From the repository's root.
set -eu
for kind in address,undefined thread; do
    build="build/sanitize-$(echo "$kind" | tr ',' '-')"
    cmake -S engine/core -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBRANCHLINE_SANITIZE="$kind"
    cmake --build "$build" --parallel
    echo "== $kind"
    (cd "$build" && ctest --output-on-failure)
done
