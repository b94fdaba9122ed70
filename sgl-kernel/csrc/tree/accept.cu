// ddtree_accept: one warp a request. Lane i holds rows i, i + 32, ... in registers; a step of the walk is one compare a
// row and one reduction, whatever the number of siblings.
#include "tree/launch.h"

namespace ddtree {
namespace {

constexpr int kLanes = 32;
constexpr int kRowsPerLane = kMaxRows / kLanes;
constexpr unsigned kWarp = 0xffffffff;

__global__ void __launch_bounds__(kLanes) accept_kernel(const __grid_constant__ AcceptParams p) {
  __shared__ int64_t target[kMaxRows];
  const int lane = threadIdx.x;
  const int64_t first = int64_t{blockIdx.x} * p.rows;
  int64_t tokens[kRowsPerLane];
  int parents[kRowsPerLane];
#pragma unroll
  for (int j = 0; j < kRowsPerLane; ++j) {
    const int row = j * kLanes + lane;
    const bool exists = row < p.rows;
    tokens[j] = exists ? p.tokens[first + row] : 0;
    parents[j] = exists ? p.parents[first + row] : -1;
    if (exists) target[row] = p.target[first + row];
  }
  __syncwarp();

  int64_t* path = p.path + int64_t{blockIdx.x} * p.max_length;
  int64_t* output = p.output + int64_t{blockIdx.x} * p.max_length;
  int length = 0;
  unsigned row = 0;
  int64_t token = 0;
  while (row < kMaxRows && length < p.max_length) {
    token = target[row];
    if (lane == 0) {
      path[length] = row;
      output[length] = token;
    }
    ++length;
    unsigned child = kMaxRows;
#pragma unroll
    for (int j = kRowsPerLane - 1; j >= 0; --j) {
      if (parents[j] == static_cast<int>(row) && tokens[j] == token) child = j * kLanes + lane;
    }
    row = __reduce_min_sync(kWarp, child);
  }
  for (int i = length + lane; i < p.max_length; i += kLanes) path[i] = output[i] = 0;
  if (lane == 0) {
    p.lengths[blockIdx.x] = length;
    p.bonus[blockIdx.x] = token;
  }
}

}  // namespace

void launch_accept(const AcceptParams& p, cudaStream_t stream) {
  if (p.b == 0) return;  // an empty grid is a launch error
  accept_kernel<<<p.b, kLanes, 0, stream>>>(p);
}

}  // namespace ddtree
