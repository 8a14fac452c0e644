#!/bin/sh
# fuzz.sh [OPERATIONS [SEED]]: random operations under AddressSanitizer and UBSan, 10 million by default, then random arguments
# for the bindings. From the repository's root.
set -eu
build=build/sanitize-address-undefined
cmake -S engine/core -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBRANCHLINE_SANITIZE=address,undefined
cmake --build "$build" --parallel --target walk
"$build/walk" "${1:-10000000}" "${2:-$(date +%s)}"
"${PYTHON:-python3}" -m tests.properties.fuzz_bindings --calls 1000000 --seed "${2:-$(date +%s)}"
