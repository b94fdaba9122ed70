// ddtree_accept: one warp per request. Lane i holds nodes i, i + 32, ... in registers. A step of the walk is one
// comparison per held node and one reduction, regardless of the number of siblings.
#include "tree/launch.h"

namespace ddtree {
namespace {

constexpr int kLanes = 32;
constexpr int kNodesPerLane = kMaxNodes / kLanes;
constexpr unsigned kWarp = 0xffffffff;

__global__ void __launch_bounds__(kLanes) accept_kernel(const __grid_constant__ AcceptParams p) {
  __shared__ int64_t target[kMaxNodes];
  const int lane = threadIdx.x;
  const int64_t first = int64_t{blockIdx.x} * p.num_nodes;
  int64_t tokens[kNodesPerLane];
  int parents[kNodesPerLane];
#pragma unroll
  for (int j = 0; j < kNodesPerLane; ++j) {
    const int node = j * kLanes + lane;
    const bool exists = node < p.num_nodes;
    tokens[j] = exists ? p.tokens[first + node] : 0;
    parents[j] = exists ? p.parents[first + node] : -1;
    if (exists) target[node] = p.target[first + node];
  }
  __syncwarp();

  int64_t* path = p.path + int64_t{blockIdx.x} * p.block_size;
  int64_t* output = p.output + int64_t{blockIdx.x} * p.block_size;
  int length = 0;
  unsigned node = 0;
  int64_t token = 0;
  while (node < kMaxNodes && length < p.block_size) {
    token = target[node];
    if (lane == 0) {
      path[length] = node;
      output[length] = token;
    }
    ++length;
    unsigned child = kMaxNodes;
#pragma unroll
    for (int j = kNodesPerLane - 1; j >= 0; --j) {
      if (parents[j] == static_cast<int>(node) && tokens[j] == token) child = j * kLanes + lane;
    }
    node = __reduce_min_sync(kWarp, child);
  }
  for (int i = length + lane; i < p.block_size; i += kLanes) path[i] = output[i] = 0;
  if (lane == 0) {
    p.lengths[blockIdx.x] = length;
    p.bonus[blockIdx.x] = token;
  }
}

}  // namespace

void launch_accept(const AcceptParams& p, cudaStream_t stream) {
  if (p.bs == 0) return;  // an empty grid is a launch error
  accept_kernel<<<p.bs, kLanes, 0, stream>>>(p);
}

}  // namespace ddtree
