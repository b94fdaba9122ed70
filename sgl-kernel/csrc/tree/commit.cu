// ddtree_commit: block (request, chunk) moves kChunkBytes of each accepted node's row, in one KV buffer or in hidden.
//
// A thread owns 16 bytes (or single bytes, if a buffer is not aligned) at one offset of every row along the path. No
// two threads touch the same byte of a KV buffer, so only the order of moves within a thread matters. A thread reads
// kBatch rows before it writes them, and takes batches in ascending order. A batch that starts at i reads the rows of
// nodes path[i...] >= i, while earlier batches wrote rows below i (see CommitParams). No move reads what another wrote.
#include "tree/launch.h"

namespace ddtree {
namespace {

constexpr int kThreads = 128;
constexpr int kChunkBytes = kThreads * 16;
constexpr int kBatch = 8;
constexpr int kMaxPath = kMaxNodes;  // a path visits each node at most once

// Moves row from[i] to row to[i] for i < count, at this thread's offsets in [begin, end). The two bases may be equal.
template <typename Vector>
__device__ void move_rows(const char* from_base, char* to_base, const int64_t* from, const int64_t* to, int count,
                          int64_t stride, int64_t begin, int64_t end) {
  for (int64_t at = begin + threadIdx.x * int64_t{sizeof(Vector)}; at < end; at += kThreads * int64_t{sizeof(Vector)}) {
    for (int i = 0; i < count; i += kBatch) {
      Vector values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j < count) values[j] = *reinterpret_cast<const Vector*>(from_base + from[i + j] * stride + at);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j < count) *reinterpret_cast<Vector*>(to_base + to[i + j] * stride + at) = values[j];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    commit_kernel(const __grid_constant__ CommitParams p, int chunks_per_buffer) {
  __shared__ int64_t from[kMaxPath], to[kMaxPath];
  const int request = blockIdx.x;
  const int kv_chunks = p.num_buffers * chunks_per_buffer;
  const bool is_hidden = static_cast<int>(blockIdx.y) >= kv_chunks;
  const int64_t chunk = is_hidden ? blockIdx.y - kv_chunks : blockIdx.y % chunks_per_buffer;
  const int64_t* path = p.path + int64_t{request} * p.block_size;
  const int64_t* slots = p.slots + int64_t{request} * p.num_nodes;

  const char* from_base = p.hidden;
  char* to_base = p.hidden_out;
  int64_t row_bytes = p.hidden_bytes, stride = p.hidden_bytes;
  int count = p.block_size, skip = 0;
  if (!is_hidden) {
    const KVBuffer buffer = p.buffers[blockIdx.y / chunks_per_buffer];
    from_base = to_base = buffer.base;
    row_bytes = buffer.row_bytes;
    stride = buffer.row_stride;
    count = p.lengths[request];
    if (chunk * kChunkBytes >= row_bytes) return;
  }
  // Rows before the first one out of place need no move. From that one on, path[i] > i.
  for (int i0 = 0; !is_hidden && i0 < count; i0 += kThreads) {
    const int i = i0 + threadIdx.x;
    const int in_place = __syncthreads_count(i < count && path[i] == i);
    skip += in_place;
    if (in_place < kThreads) break;
  }
  for (int i = skip + threadIdx.x; i < count; i += kThreads) {
    from[i] = is_hidden ? int64_t{request} * p.num_nodes + path[i] : slots[path[i]];
    to[i] = is_hidden ? int64_t{request} * p.block_size + i : slots[i];
  }
  __syncthreads();

  const int64_t begin = chunk * kChunkBytes, end = min(begin + kChunkBytes, row_bytes);
  const uint64_t alignment = reinterpret_cast<uint64_t>(from_base) | reinterpret_cast<uint64_t>(to_base) |
                             static_cast<uint64_t>(row_bytes) | static_cast<uint64_t>(stride);
  if (alignment % sizeof(uint4) == 0) {
    move_rows<uint4>(from_base, to_base, from + skip, to + skip, count - skip, stride, begin, end);
  } else {
    move_rows<uint8_t>(from_base, to_base, from + skip, to + skip, count - skip, stride, begin, end);
  }
}

int64_t chunks_of(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }

}  // namespace

void launch_commit(const CommitParams& p, cudaStream_t stream) {
  const int64_t per_buffer = chunks_of(p.max_row_bytes);
  const int64_t chunks = p.num_buffers * per_buffer + (p.hidden ? chunks_of(p.hidden_bytes) : 0);
  if (p.bs == 0 || chunks == 0) return;  // an empty grid is a launch error
  const dim3 grid(p.bs, static_cast<unsigned>(chunks));
  commit_kernel<<<grid, kThreads, 0, stream>>>(p, static_cast<int>(per_buffer));
}

}  // namespace ddtree
