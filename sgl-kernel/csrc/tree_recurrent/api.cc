#include "tree_recurrent/api.h"

#include <torch/csrc/stable/ops.h>

#include "common/check.h"
#include "tree_recurrent/reference.h"

namespace ddtree {
namespace {

constexpr ScalarType kLong = ScalarType::Long, kInt = ScalarType::Int, kFloat = ScalarType::Float;
constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::BFloat16, ScalarType::Half, kFloat};
constexpr std::initializer_list<ScalarType> kIndices = {kInt, kLong};

// A tensor of [rows, heads, ...] or [rows, channels]: the last dimension is contiguous, or is the heads' own.
FloatArray array_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), dtype_of(tensor), tensor.stride(0), tensor.dim() > 1 ? tensor.stride(1) : 0};
}

// A tensor of [heads] or [heads, d_k].
FloatArray head_array(const char* name, const OptionalTensor& tensor, const Arg& first,
                      std::initializer_list<int64_t> shape) {
  if (!tensor) return {};
  Arg(name, *tensor).on(first).dtype(kFloats).shape(shape).contiguous();
  return {tensor->const_data_ptr(), dtype_of(*tensor), 0, tensor->stride(0)};
}

IndexArray index_array(const char* name, const Tensor& tensor, const Arg& first, int64_t bs) {
  Arg(name, tensor).on(first).dtype(kIndices).shape({bs}).contiguous();
  return {tensor.const_data_ptr(), tensor.scalar_type() == kLong};
}

void check_presence(const char* name, const OptionalTensor& tensor, bool wanted, const char* reason) {
  check(tensor.has_value() == wanted, name, std::string(wanted ? "a tensor" : "None") + " " + reason,
        tensor ? "a tensor" : "None");
}

// states: [slots, h_v, d_v, d_k], or with the layers in front. k or v may be the contiguous one.
StatePool state_pool(const Tensor& states) {
  const int64_t at = states.dim() - 4;
  return {const_cast<void*>(states.const_data_ptr()),
          dtype_of(states),
          at ? states.stride(0) : 0,
          states.stride(at),
          states.stride(at + 1),
          states.stride(at + 2),
          states.stride(at + 3)};
}

void check_states(const Arg& arg, const Tensor& states, std::initializer_list<int64_t> shape) {
  arg.dtype(kFloats).shape(shape);
  const int64_t d = states.dim();
  check(states.stride(d - 1) == 1 || states.stride(d - 2) == 1, "states",
        "one of the last two dimensions [d_v, d_k] with stride 1",
        "strides " + std::to_string(states.stride(d - 2)) + " and " + std::to_string(states.stride(d - 1)));
}

// window: [slots, dim, width - 1], or with the layers in front. Any strides.
StatePool window_pool(const Tensor& window) {
  const int64_t at = window.dim() - 3;
  return {const_cast<void*>(window.const_data_ptr()),
          dtype_of(window),
          at ? window.stride(0) : 0,
          window.stride(at),
          window.stride(at + 1),
          0,
          window.stride(at + 2)};
}

void check_width(int64_t width) {
  check(width >= 2 && width <= kMaxConvWidth, "weight", "a width of 2 to " + std::to_string(kMaxConvWidth), width);
}

// How many nodes each request has.
int64_t nodes_of(const char* name, int64_t rows, int64_t bs) {
  check(bs == 0 ? rows == 0 : rows % bs == 0 && rows > 0, name,
        "as many rows for each of the " + std::to_string(bs) + " requests of state_indices",
        std::to_string(rows) + " rows");
  return bs == 0 ? 0 : rows / bs;
}

const uint64_t* ancestor_words(const Tensor& ancestors, const Arg& first, int64_t rows, int64_t num_nodes) {
  Arg("ancestors", ancestors).on(first).dtype({kLong}).shape({rows, Arg::kAny}).contiguous();
  check(ancestors.size(1) * kAncestorWordBits >= num_nodes, "ancestors",
        "a word of 64 bits for each 64 of the " + std::to_string(num_nodes) + " nodes of a request",
        "shape " + shape_string(ancestors));
  return reinterpret_cast<const uint64_t*>(ancestors.const_data_ptr<int64_t>());
}

// The arguments that say what of a step is committed: the same for states and windows.
template <typename Params>
void set_path(Params& p, const Arg& first, const Tensor& state_indices, const Tensor& path, const Tensor& lengths,
              const OptionalTensor& track_indices, const OptionalTensor& track_positions) {
  Arg("path", path).on(first).dtype({kLong}).dims(2).contiguous();
  const int64_t bs = path.size(0);
  Arg("lengths", lengths).on(first).dtype({kInt}).shape({bs}).contiguous();
  p.state_indices = index_array("state_indices", state_indices, first, bs);
  check_presence("track_positions", track_positions, track_indices.has_value(), "with or without track_indices");
  if (track_indices) {
    p.track_indices = index_array("track_indices", *track_indices, first, bs);
    p.track_positions = index_array("track_positions", *track_positions, first, bs);
  }
  p.path = path.const_data_ptr<int64_t>();
  p.lengths = lengths.const_data_ptr<int32_t>();
  p.bs = static_cast<int32_t>(bs);
  p.block_size = static_cast<int32_t>(path.size(1));
}

// Layers of [bs N, ...], each contiguous.
void check_kept(const char* name, const Tensor& kept, const Arg& first, std::initializer_list<ScalarType> types,
                std::initializer_list<int64_t> shape) {
  Arg(name, kept).on(first).dtype(types).shape(shape);
  int64_t expected = 1;
  for (int64_t i = kept.dim() - 1; i >= 1; --i) {
    check(kept.size(i) <= 1 || kept.stride(i) == expected, name, "contiguous layers",
          "stride " + std::to_string(kept.stride(i)) + " in dimension " + std::to_string(i));
    expected *= kept.size(i);
  }
}

}  // namespace

RecurrentVerifyParams recurrent_verify_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& states,
                                              const Tensor& state_indices, const Tensor& ancestors, int64_t kind,
                                              const OptionalTensor& gate, const OptionalTensor& beta,
                                              const Tensor& decay, const OptionalTensor& bias,
                                              const OptionalTensor& skip, double scale, bool normalize,
                                              double lower_bound, const Tensor& o, const Tensor& k_kept,
                                              const Tensor& u_kept, const Tensor& g_kept) {
  RecurrentVerifyParams p{};
  check(kind >= 0 && kind <= 3, "kind", "0 to 3", kind);
  p.kind = static_cast<RecurrentKind>(kind);
  const bool per_channel = p.kind == RecurrentKind::kChannelDelta;

  const Arg first("q", q);
  first.dtype(kFloats).dims(3).last_dim_contiguous();
  const int64_t rows = q.size(0), h_k = q.size(1), d_k = q.size(2);
  const ScalarType dtype = q.scalar_type();
  Arg("k", k).on(first).dtype({dtype}).shape({rows, h_k, d_k}).last_dim_contiguous();
  Arg("v", v).on(first).dtype({dtype}).shape({rows, Arg::kAny, Arg::kAny}).last_dim_contiguous();
  const int64_t h_v = v.size(1), d_v = v.size(2);
  check(h_k >= 1 && h_v % h_k == 0, "v", "a multiple of the " + std::to_string(h_k) + " heads of q",
        std::to_string(h_v) + " heads");
  Arg("state_indices", state_indices).dims(1);
  const int64_t bs = state_indices.size(0), N = nodes_of("q", rows, bs);
  p.state_indices = index_array("state_indices", state_indices, first, bs);
  p.ancestors = ancestor_words(ancestors, first, rows, N);

  const Arg states_arg("states", states);
  check_states(states_arg.on(first), states, {Arg::kAny, h_v, d_v, d_k});
  p.states = state_pool(states);

  check_presence("gate", gate, p.kind != RecurrentKind::kFixedDecay, "for this kind of layer");
  check_presence("beta", beta, is_delta(p.kind), "for this kind of layer");
  if (gate) {
    const Arg arg("gate", *gate);
    arg.on(first).dtype(kFloats).last_dim_contiguous();
    per_channel ? arg.shape({rows, h_v, d_k}) : arg.shape({rows, h_v});
    p.gate = array_of(*gate);
  }
  if (beta) {
    Arg("beta", *beta).on(first).dtype(kFloats).shape({rows, h_v}).last_dim_contiguous();
    p.beta = array_of(*beta);
  }
  p.decay = head_array("decay", decay, first, {h_v});
  p.bias = per_channel ? head_array("bias", bias, first, {h_v, d_k}) : head_array("bias", bias, first, {h_v});
  p.skip = head_array("skip", skip, first, {h_v});

  Arg("o", o).on(first).dtype({dtype}).shape({rows, h_v, d_v}).last_dim_contiguous();
  Arg("k_kept", k_kept).on(first).dtype({dtype}).shape({rows, h_k, d_k}).contiguous();
  Arg("u_kept", u_kept).on(first).dtype({kFloat}).shape({rows, h_v, d_v}).contiguous();
  const Arg g_arg("g_kept", g_kept);
  g_arg.on(first).dtype({kFloat}).contiguous();
  per_channel ? g_arg.shape({rows, h_v, d_k}) : g_arg.shape({rows, h_v});

  p.q = array_of(q);
  p.k = array_of(k);
  p.v = array_of(v);
  p.o = array_of(o);
  p.k_kept = k_kept.mutable_data_ptr();
  p.u_kept = u_kept.mutable_data_ptr<float>();
  p.g_kept = g_kept.mutable_data_ptr<float>();
  p.scale = static_cast<float>(scale);
  p.normalize = normalize;
  p.lower_bound = static_cast<float>(lower_bound);
  p.bs = static_cast<int32_t>(bs);
  p.num_nodes = static_cast<int32_t>(N);
  p.words = static_cast<int32_t>(ancestors.size(1));
  p.h_k = static_cast<int32_t>(h_k);
  p.h_v = static_cast<int32_t>(h_v);
  p.d_k = static_cast<int32_t>(d_k);
  p.d_v = static_cast<int32_t>(d_v);
  p.heads_per_key = p.h_v / p.h_k;
  return p;
}

RecurrentCommitParams recurrent_commit_params(const Tensor& states, const Tensor& state_indices, const Tensor& path,
                                              const Tensor& lengths, const Tensor& k_kept, const Tensor& u_kept,
                                              const Tensor& g_kept, const OptionalTensor& track_indices,
                                              const OptionalTensor& track_positions) {
  RecurrentCommitParams p{};
  const Arg first("states", states);
  check_states(first, states, {Arg::kAny, Arg::kAny, Arg::kAny, Arg::kAny, Arg::kAny});
  const int64_t layers = states.size(0), h_v = states.size(2), d_v = states.size(3), d_k = states.size(4);
  set_path(p, first, state_indices, path, lengths, track_indices, track_positions);
  check_kept("k_kept", k_kept, first, kFloats, {layers, Arg::kAny, Arg::kAny, d_k});
  const int64_t rows = k_kept.size(1), h_k = k_kept.size(2);
  check(h_k >= 1 && h_v % h_k == 0, "k_kept", "a divisor of the states' " + std::to_string(h_v) + " heads",
        std::to_string(h_k) + " heads");
  check_kept("u_kept", u_kept, first, {kFloat}, {layers, rows, h_v, d_v});
  p.per_channel = g_kept.dim() == 4;
  if (p.per_channel) {
    check_kept("g_kept", g_kept, first, {kFloat}, {layers, rows, h_v, d_k});
  } else {
    check_kept("g_kept", g_kept, first, {kFloat}, {layers, rows, h_v});
  }

  p.states = state_pool(states);
  p.k = {k_kept.const_data_ptr(), dtype_of(k_kept)};
  p.u = u_kept.const_data_ptr<float>();
  p.g = g_kept.const_data_ptr<float>();
  p.k_stride_layer = k_kept.stride(0);
  p.u_stride_layer = u_kept.stride(0);
  p.g_stride_layer = g_kept.stride(0);
  p.layers = static_cast<int32_t>(layers);
  p.num_nodes = static_cast<int32_t>(nodes_of("k_kept", rows, p.bs));
  p.h_k = static_cast<int32_t>(h_k);
  p.h_v = static_cast<int32_t>(h_v);
  p.d_k = static_cast<int32_t>(d_k);
  p.d_v = static_cast<int32_t>(d_v);
  p.heads_per_key = p.h_v / p.h_k;
  return p;
}

ConvVerifyParams conv_verify_params(const Tensor& x, const Tensor& window, const Tensor& state_indices,
                                    const Tensor& ancestors, const Tensor& weight, const OptionalTensor& bias,
                                    bool silu, const Tensor& out, const Tensor& x_kept) {
  ConvVerifyParams p{};
  const Arg first("x", x);
  first.dtype(kFloats).dims(2).last_dim_contiguous();
  const int64_t rows = x.size(0), dim = x.size(1);
  const ScalarType dtype = x.scalar_type();
  Arg("state_indices", state_indices).dims(1);
  const int64_t bs = state_indices.size(0), N = nodes_of("x", rows, bs);
  p.state_indices = index_array("state_indices", state_indices, first, bs);
  p.ancestors = ancestor_words(ancestors, first, rows, N);
  Arg("weight", weight).on(first).dtype(kFloats).shape({dim, Arg::kAny}).contiguous();
  const int64_t width = weight.size(1);
  check_width(width);
  Arg("window", window).on(first).dtype({dtype}).shape({Arg::kAny, dim, width - 1});
  p.bias = head_array("bias", bias, first, {dim});
  Arg("out", out).on(first).dtype({dtype}).shape({rows, dim}).last_dim_contiguous();
  Arg("x_kept", x_kept).on(first).dtype({dtype}).shape({rows, dim}).contiguous();

  p.x = array_of(x);
  p.window = window_pool(window);
  p.weight = array_of(weight);
  p.out = array_of(out);
  p.x_kept = x_kept.mutable_data_ptr();
  p.silu = silu;
  p.bs = static_cast<int32_t>(bs);
  p.num_nodes = static_cast<int32_t>(N);
  p.words = static_cast<int32_t>(ancestors.size(1));
  p.dim = static_cast<int32_t>(dim);
  p.width = static_cast<int32_t>(width);
  return p;
}

ConvCommitParams conv_commit_params(const Tensor& window, const Tensor& state_indices, const Tensor& path,
                                    const Tensor& lengths, const Tensor& x_kept, const OptionalTensor& track_indices,
                                    const OptionalTensor& track_positions) {
  ConvCommitParams p{};
  const Arg first("window", window);
  first.dtype(kFloats).dims(4);
  const int64_t layers = window.size(0), dim = window.size(2), width = window.size(3) + 1;
  check(width >= 2 && width <= kMaxConvWidth, "window",
        "1 to " + std::to_string(kMaxConvWidth - 1) + " positions in the last dimension", width - 1);
  set_path(p, first, state_indices, path, lengths, track_indices, track_positions);
  check_kept("x_kept", x_kept, first, {window.scalar_type()}, {layers, Arg::kAny, dim});

  p.window = window_pool(window);
  p.x = {x_kept.const_data_ptr(), dtype_of(x_kept)};
  p.x_stride_layer = x_kept.stride(0);
  p.layers = static_cast<int32_t>(layers);
  p.num_nodes = static_cast<int32_t>(nodes_of("x_kept", x_kept.size(1), p.bs));
  p.dim = static_cast<int32_t>(dim);
  p.width = static_cast<int32_t>(width);
  return p;
}

namespace {

template <typename Params>
void run_items(const Params& params) {
  torch::stable::parallel_for(0, num_items(params), 1,
                              [&](int64_t begin, int64_t end) { run_reference(params, begin, end); });
}

}  // namespace

void run_cpu(const RecurrentVerifyParams& params, const Tensor&) { run_items(params); }
void run_cpu(const RecurrentCommitParams& params, const Tensor&) { run_items(params); }
void run_cpu(const ConvVerifyParams& params, const Tensor&) { run_items(params); }
void run_cpu(const ConvCommitParams& params, const Tensor&) { run_items(params); }

}  // namespace ddtree
