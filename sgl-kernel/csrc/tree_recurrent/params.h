// Parameters of the ops that run draft trees over recurrent layers, shared by the CUDA kernels and the CPU reference.
// No torch here or below: api.cc turns tensors into these structs.
//
// A layer keeps a state per request and value head, S [d_k, d_v]. One token of the sequence turns it into
//     S' = diag(exp(g)) S + k u^T,   o = S'^T q
// and a node of a draft tree does that to its parent's state; the root's parent is the request's stored state S_0.
// Verify computes o for every node without any node's state, from the sums G of g along the node's path:
//     S_t = exp(G_t) S_0 + sum over s in path(t) of exp(G_t - G_s) k_s u_s^T
// Delta rules (u depends on the parent's state) need a triangular system to be solved for U; see verify.cuh.
#pragma once

#include <cstdint>

#include "common/draft_tree.h"
#include "common/dtype.h"

namespace ddtree {

constexpr int kMaxRecurrentNodes = 64;  // N of the CUDA kernels
constexpr int kMaxConvWidth = 5;
constexpr float kNormEpsilon = 1e-6f;        // added to the sum of squares of q and k
constexpr float kSoftplusThreshold = 20.0f;  // softplus(x) = x above it

// What g and u are. x is the node's `gate` input plus `bias`, h the value head, S_p the parent's state.
enum class RecurrentKind : int32_t {
  // GDN: g = -exp(decay[h]) softplus(x), u = sigmoid(beta) (v - (exp(g) S_p)^T k)
  kGatedDelta = 0,
  // KDA: the same with a g per key channel; with a lower bound, g = lower_bound * sigmoid(exp(decay[h]) x)
  kChannelDelta = 1,
  // Mamba2: dt = softplus(x), g = decay[h] dt, u = dt v, and o gets skip[h] v on top
  kStateSpace = 2,
  // Linear attention: g = -decay[h], u = v
  kFixedDecay = 3,
};

inline constexpr bool is_delta(RecurrentKind kind) {
  return kind == RecurrentKind::kGatedDelta || kind == RecurrentKind::kChannelDelta;
}

// A tensor of floats of any of the types; strides in elements.
struct FloatArray {
  const void* data = nullptr;
  DType type = DType::kFloat32;
  int64_t stride_t = 0, stride_h = 0;  // per node and per head; the last dimension is contiguous
};

// The request's states: element (slot, h, v, k) is at slot * stride_slot + h * stride_h + v * stride_v + k * stride_k.
struct StatePool {
  void* data = nullptr;
  DType type = DType::kFloat32;
  int64_t stride_layer = 0, stride_slot = 0, stride_h = 0, stride_v = 0, stride_k = 0;
};

// Indices of int32 or int64. Negative: none.
struct IndexArray {
  const void* data = nullptr;
  bool is_64 = false;
};

// Request r owns rows [r N, (r + 1) N) of every array of rows.
struct RecurrentVerifyParams {
  FloatArray q, k;   // [bs N, h_k, d_k]; value head h reads key head h / (h_v / h_k)
  FloatArray v;      // [bs N, h_v, d_v]
  FloatArray gate;   // [bs N, h_v], per channel: [bs N, h_v, d_k]; kFixedDecay: none
  FloatArray beta;   // [bs N, h_v], delta rules only
  FloatArray decay;  // [h_v]
  FloatArray bias;   // [h_v], per channel: [h_v, d_k]; or none
  FloatArray skip;   // [h_v] or none
  StatePool states;
  IndexArray state_indices;   // [bs]; a request without a slot: o is zero, nothing is kept for the commit
  const uint64_t* ancestors;  // [bs N, words]

  FloatArray o;  // [bs N, h_v, d_v] (written)
  // What commit needs. u is divided by the norm of k, so that k can stay as it came.
  void* k_kept;   // [bs N, h_k, d_k] of k's type
  float* u_kept;  // [bs N, h_v, d_v]
  float* g_kept;  // [bs N, h_v], per channel: [bs N, h_v, d_k]

  RecurrentKind kind;
  float scale;        // of q
  bool normalize;     // divide q and k by their L2 norms
  float lower_bound;  // kChannelDelta: 0 for the softplus gate
  int32_t bs, num_nodes, words, h_k, h_v, d_k, d_v;
  int32_t heads_per_key;  // h_v / h_k
};

// Applies the accepted paths of all layers.
struct RecurrentCommitParams {
  StatePool states;
  IndexArray state_indices;  // [bs]; a request without a slot, or with a path of length 0, is left as it is
  const int64_t* path;       // [bs, block_size] nodes, root first
  const int32_t* lengths;    // [bs]
  FloatArray k;              // [layers, bs N, h_k, d_k] contiguous but for the layers
  const float* u;            // [layers, bs N, h_v, d_v]
  const float* g;            // [layers, bs N, h_v], per channel: [layers, bs N, h_v, d_k]
  int64_t k_stride_layer, u_stride_layer, g_stride_layer;
  // The state after path position track_positions[r] also goes to slot track_indices[r]. Either negative: nowhere.
  IndexArray track_indices;  // [bs] or none
  IndexArray track_positions;
  bool per_channel;
  int32_t layers, bs, num_nodes, block_size, h_k, h_v, d_k, d_v;
  int32_t heads_per_key;
};

// A node's output is act(bias + sum over j < width of weight[width - 1 - j] x_j), x_0 the node's input, x_j the one of
// its j-th nearest ancestor, and past the root the stored window, latest input last.
struct ConvVerifyParams {
  FloatArray x;               // [bs N, dim]
  StatePool window;           // (slot, channel, position): stride_h per channel, stride_k per position
  IndexArray state_indices;   // [bs]; a request without a slot: out is zero, nothing is kept for the commit
  const uint64_t* ancestors;  // [bs N, words]
  FloatArray weight;          // [dim, width] contiguous
  FloatArray bias;            // [dim] or none
  FloatArray out;             // [bs N, dim] (written)
  void* x_kept;               // [bs N, dim] of x's type, contiguous
  bool silu;
  int32_t bs, num_nodes, words, dim, width;
};

struct ConvCommitParams {
  StatePool window;
  IndexArray state_indices;
  const int64_t* path;
  const int32_t* lengths;
  FloatArray x;  // [layers, bs N, dim], contiguous but for the layers
  int64_t x_stride_layer;
  IndexArray track_indices, track_positions;  // as in RecurrentCommitParams
  int32_t layers, bs, num_nodes, block_size, dim, width;
};

}  // namespace ddtree
