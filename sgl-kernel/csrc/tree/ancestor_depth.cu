#include "tree/ancestor_depth.cuh"

namespace ddtree {
namespace {

__global__ void ancestor_depth_kernel(const uint64_t* ancestors, int32_t* depth, int64_t rows, int64_t words) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= rows) return;
  int32_t count = 0;
  for (int64_t w = 0; w < words; ++w) count += __popcll(ancestors[row * words + w]);
  depth[row] = count - 1;  // a row is not its own ancestor
}

}  // namespace

void launch_ancestor_depth(const uint64_t* ancestors, int32_t* depth, int64_t rows, int64_t words,
                           cudaStream_t stream) {
  if (rows == 0) return;  // an empty grid is a launch error
  constexpr int kThreads = 128;
  ancestor_depth_kernel<<<static_cast<unsigned>((rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      ancestors, depth, rows, words);
}

}  // namespace ddtree
