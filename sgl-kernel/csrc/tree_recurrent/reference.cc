#include "tree_recurrent/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/float_types.h"
#include "tree_recurrent/parent.h"

namespace ddtree {
namespace {

double read(DType type, const void* data, int64_t i) {
  switch (type) {
    case DType::kBFloat16: return static_cast<const BFloat16*>(data)[i];
    case DType::kFloat16: return static_cast<const Float16*>(data)[i];
    default: return static_cast<const float*>(data)[i];
  }
}

void write(DType type, void* data, int64_t i, double value) {
  const float rounded = static_cast<float>(value);
  switch (type) {
    case DType::kBFloat16: static_cast<BFloat16*>(data)[i] = BFloat16::round(rounded); break;
    case DType::kFloat16: static_cast<Float16*>(data)[i] = Float16::round(rounded); break;
    default: static_cast<float*>(data)[i] = rounded; break;
  }
}

int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

double read(const FloatArray& array, int64_t row, int64_t head, int64_t i = 0) {
  return read(array.type, array.data, row * array.stride_t + head * array.stride_h + i);
}

int64_t read(const IndexArray& array, int64_t i) {
  if (array.data == nullptr) return -1;
  return array.is_64 ? static_cast<const int64_t*>(array.data)[i] : static_cast<const int32_t*>(array.data)[i];
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return x > kSoftplusThreshold ? x : std::log1p(std::exp(x)); }

// Per node of one request and value head, what does not depend on a state.
struct NodeInputs {
  std::vector<double> q, k;   // scaled and normalized
  std::vector<double> g;      // per channel, or one
  double beta = 1, norm = 1;  // u = beta * (...); norm of k
};

NodeInputs node_inputs(const RecurrentVerifyParams& p, int64_t row, int head) {
  const int key_head = head / p.heads_per_key;
  NodeInputs in;
  double q_squares = 0, k_squares = 0;
  for (int c = 0; c < p.d_k; ++c) {
    in.q.push_back(read(p.q, row, key_head, c));
    in.k.push_back(read(p.k, row, key_head, c));
    q_squares += in.q.back() * in.q.back();
    k_squares += in.k.back() * in.k.back();
  }
  in.norm = p.normalize ? std::sqrt(k_squares + kNormEpsilon) : 1;
  const double q_norm = p.normalize ? std::sqrt(q_squares + kNormEpsilon) : 1;
  for (int c = 0; c < p.d_k; ++c) {
    in.q[c] *= p.scale / q_norm;
    in.k[c] /= in.norm;
  }

  const double decay = read(p.decay, 0, head);
  const auto gate = [&](int c) { return read(p.gate, row, head, c) + (p.bias.data ? read(p.bias, 0, head, c) : 0); };
  switch (p.kind) {
    case RecurrentKind::kGatedDelta:
      in.g = {-std::exp(decay) * softplus(gate(0))};
      in.beta = sigmoid(read(p.beta, row, head));
      break;
    case RecurrentKind::kChannelDelta:
      for (int c = 0; c < p.d_k; ++c) {
        in.g.push_back(p.lower_bound != 0 ? p.lower_bound * sigmoid(std::exp(decay) * gate(c))
                                          : -std::exp(decay) * softplus(gate(c)));
      }
      in.beta = sigmoid(read(p.beta, row, head));
      break;
    case RecurrentKind::kStateSpace:
      in.beta = softplus(gate(0));
      in.g = {decay * in.beta};
      break;
    case RecurrentKind::kFixedDecay: in.g = {-decay}; break;
  }
  return in;
}

// One request and value head. A column of S is a recurrence of its own, so only one column per node is kept.
void verify_head(const RecurrentVerifyParams& p, int request, int head) {
  const int64_t slot = read(p.state_indices, request), first = int64_t{request} * p.num_nodes;
  const auto out = [&](int node) { return (first + node) * p.o.stride_t + head * p.o.stride_h; };
  void* o = const_cast<void*>(p.o.data);
  if (slot < 0) {
    for (int t = 0; t < p.num_nodes; ++t) {
      for (int j = 0; j < p.d_v; ++j) write(p.o.type, o, out(t) + j, 0);
    }
    return;
  }

  std::vector<NodeInputs> inputs;
  std::vector<int> parents;
  for (int t = 0; t < p.num_nodes; ++t) {
    inputs.push_back(node_inputs(p, first + t, head));
    parents.push_back(parent_of(p.ancestors + (first + t) * p.words, t));
    const NodeInputs& in = inputs.back();
    const int64_t channels = static_cast<int64_t>(in.g.size());
    for (int64_t c = 0; c < channels; ++c) {
      p.g_kept[((first + t) * p.h_v + head) * channels + c] = static_cast<float>(in.g[c]);
    }
    if (head % p.heads_per_key == 0) {
      const int key_head = head / p.heads_per_key;
      const int64_t size = size_of(p.k.type);
      std::memcpy(static_cast<char*>(p.k_kept) + ((first + t) * p.h_k + key_head) * p.d_k * size,
                  static_cast<const char*>(p.k.data) + ((first + t) * p.k.stride_t + key_head * p.k.stride_h) * size,
                  p.d_k * size);
    }
  }

  std::vector<double> column((p.num_nodes + 1) * p.d_k);  // of S_0, then of each node's state
  for (int j = 0; j < p.d_v; ++j) {
    const int64_t at = slot * p.states.stride_slot + head * p.states.stride_h + j * p.states.stride_v;
    for (int c = 0; c < p.d_k; ++c) column[c] = read(p.states.type, p.states.data, at + c * p.states.stride_k);
    for (int t = 0; t < p.num_nodes; ++t) {
      const NodeInputs& in = inputs[t];
      const double* before = &column[(parents[t] + 1) * p.d_k];
      double* after = &column[(t + 1) * p.d_k];
      const double v = read(p.v, first + t, head, j);
      double predicted = 0;
      for (int c = 0; c < p.d_k; ++c) {
        after[c] = std::exp(in.g[in.g.size() == 1 ? 0 : c]) * before[c];
        predicted += after[c] * in.k[c];
      }
      const double u = in.beta * (is_delta(p.kind) ? v - predicted : v);
      double result = p.skip.data ? read(p.skip, 0, head) * v : 0;
      for (int c = 0; c < p.d_k; ++c) {
        after[c] += in.k[c] * u;
        result += after[c] * in.q[c];
      }
      p.u_kept[((first + t) * p.h_v + head) * p.d_v + j] = static_cast<float>(u / in.norm);
      write(p.o.type, o, out(t) + j, result);
    }
  }
}

// One layer, request and value head.
void commit_head(const RecurrentCommitParams& p, int layer, int request, int head) {
  const int64_t slot = read(p.state_indices, request);
  const int32_t length = p.lengths[request];
  if (slot < 0 || length <= 0) return;
  const int64_t track = read(p.track_indices, request), track_position = read(p.track_positions, request);
  const int key_head = head / p.heads_per_key, channels = p.per_channel ? p.d_k : 1;
  const auto address = [&](int64_t to_slot, int j, int c) {
    return layer * p.states.stride_layer + to_slot * p.states.stride_slot + head * p.states.stride_h +
           j * p.states.stride_v + c * p.states.stride_k;
  };

  std::vector<double> column(p.d_k);
  for (int j = 0; j < p.d_v; ++j) {
    for (int c = 0; c < p.d_k; ++c) column[c] = read(p.states.type, p.states.data, address(slot, j, c));
    for (int i = 0; i < length; ++i) {
      const int64_t row = int64_t{request} * p.num_nodes + p.path[int64_t{request} * p.block_size + i];
      const double u = p.u[layer * p.u_stride_layer + (row * p.h_v + head) * p.d_v + j];
      const float* g = p.g + layer * p.g_stride_layer + (row * p.h_v + head) * channels;
      const int64_t k = layer * p.k_stride_layer + (row * p.h_k + key_head) * p.d_k;
      for (int c = 0; c < p.d_k; ++c) {
        column[c] = std::exp(double{g[p.per_channel ? c : 0]}) * column[c] + read(p.k.type, p.k.data, k + c) * u;
      }
      if (i == track_position && track >= 0) {
        for (int c = 0; c < p.d_k; ++c) write(p.states.type, p.states.data, address(track, j, c), column[c]);
      }
    }
    for (int c = 0; c < p.d_k; ++c) write(p.states.type, p.states.data, address(slot, j, c), column[c]);
  }
}

// One row of x: all channels of a node.
void convolve_node(const ConvVerifyParams& p, int64_t row) {
  const int64_t request = row / p.num_nodes, first = request * p.num_nodes, slot = read(p.state_indices, request);
  void* out = const_cast<void*>(p.out.data);
  if (slot < 0) {
    for (int c = 0; c < p.dim; ++c) write(p.out.type, out, row * p.out.stride_t + c, 0);
    return;
  }
  // The inputs that the node reads, nearest first: rows of x, then positions of the window as -1 (latest), -2, ...
  std::vector<int64_t> sources{row};
  for (int node = static_cast<int>(row - first), window = 0; static_cast<int>(sources.size()) < p.width;) {
    if (node >= 0) node = parent_of(p.ancestors + (first + node) * p.words, node);
    sources.push_back(node >= 0 ? first + node : --window);
  }
  for (int c = 0; c < p.dim; ++c) {
    double sum = p.bias.data ? read(p.bias, 0, 0, c) : 0;
    for (int j = 0; j < p.width; ++j) {
      const int64_t position = p.width - 1 + sources[j];  // in the window, for a negative source
      const double x = sources[j] >= 0
                           ? read(p.x, sources[j], 0, c)
                           : read(p.window.type, p.window.data,
                                  slot * p.window.stride_slot + c * p.window.stride_h + position * p.window.stride_k);
      sum += read(p.weight.type, p.weight.data, int64_t{c} * p.width + p.width - 1 - j) * x;
    }
    write(p.out.type, out, row * p.out.stride_t + c, p.silu ? sum * sigmoid(sum) : sum);
  }
  const int64_t size = size_of(p.x.type);
  std::memcpy(static_cast<char*>(p.x_kept) + row * p.dim * size,
              static_cast<const char*>(p.x.data) + row * p.x.stride_t * size, p.dim * size);
}

// One layer and request.
void commit_window(const ConvCommitParams& p, int layer, int request) {
  const int64_t slot = read(p.state_indices, request);
  const int32_t length = p.lengths[request];
  if (slot < 0 || length <= 0) return;
  const int64_t track = read(p.track_indices, request), track_position = read(p.track_positions, request);
  const int kept = p.width - 1;
  std::vector<double> inputs(kept + length);  // the window, then the path's
  for (int c = 0; c < p.dim; ++c) {
    const auto address = [&](int64_t to_slot, int position) {
      return layer * p.window.stride_layer + to_slot * p.window.stride_slot + c * p.window.stride_h +
             position * p.window.stride_k;
    };
    for (int i = 0; i < kept; ++i) inputs[i] = read(p.window.type, p.window.data, address(slot, i));
    for (int i = 0; i < length; ++i) {
      const int64_t row = int64_t{request} * p.num_nodes + p.path[int64_t{request} * p.block_size + i];
      inputs[kept + i] = read(p.x.type, p.x.data, layer * p.x_stride_layer + row * p.dim + c);
    }
    for (int i = 0; i < kept; ++i) {
      if (track >= 0 && track_position >= 0 && track_position < length) {
        write(p.window.type, p.window.data, address(track, i), inputs[track_position + 1 + i]);
      }
      write(p.window.type, p.window.data, address(slot, i), inputs[length + i]);
    }
  }
}

}  // namespace

int64_t num_items(const RecurrentVerifyParams& p) { return int64_t{p.bs} * p.h_v; }
int64_t num_items(const RecurrentCommitParams& p) { return int64_t{p.layers} * p.bs * p.h_v; }
int64_t num_items(const ConvVerifyParams& p) { return int64_t{p.bs} * p.num_nodes; }
int64_t num_items(const ConvCommitParams& p) { return int64_t{p.layers} * p.bs; }

void run_reference(const RecurrentVerifyParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) verify_head(p, static_cast<int>(i / p.h_v), static_cast<int>(i % p.h_v));
}

void run_reference(const RecurrentCommitParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    commit_head(p, static_cast<int>(i / p.h_v / p.bs), static_cast<int>(i / p.h_v % p.bs), static_cast<int>(i % p.h_v));
  }
}

void run_reference(const ConvVerifyParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) convolve_node(p, i);
}

void run_reference(const ConvCommitParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) commit_window(p, static_cast<int>(i / p.bs), static_cast<int>(i % p.bs));
}

}  // namespace ddtree
