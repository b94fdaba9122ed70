#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace ddtree {

// ancestors [rows, words] contiguous, depth [rows]. One thread a row.
void launch_ancestor_depth(const uint64_t* ancestors, int32_t* depth, int64_t rows, int64_t words, cudaStream_t stream);

}  // namespace ddtree
