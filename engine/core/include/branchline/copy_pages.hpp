// The batched copy of copy-on-write.
#pragma once

#include <cstdint>

namespace branchline {

/// A page-major pool of K/V: a page is `blocks` runs of `page_tokens` tokens, each token `token_bytes` long in a run.
struct PoolLayout {
    char* data;
    int64_t num_pages;
    int64_t blocks;
    int64_t page_tokens;
    int64_t token_bytes;
};

/// Copies the first tokens[i] tokens of page src[i] to page dst[i], for each i, past the caches where that is faster.
/// Indices must be in range and destinations distinct. Returns the bytes copied.
int64_t copy_pages(const PoolLayout& pool, const int32_t* src, const int32_t* dst, const int32_t* tokens, int64_t count);

/// Copies bytes without leaving the destination in the caches, where the machine can.
void copy_past_caches(char* dst, const char* src, int64_t bytes);

}  // namespace branchline
