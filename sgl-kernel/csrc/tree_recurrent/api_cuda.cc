#include "common/check.h"
#include "common/cuda_call.h"
#include "tree_recurrent/api.h"
#include "tree_recurrent/launch.h"

namespace ddtree {
namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kMaxGrid = 65535;  // of the y and z dimensions

int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

const char* name_of(DType type) {
  switch (type) {
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
    default: return "float32";
  }
}

void check_type(const char* name, DType type, std::initializer_list<DType> allowed) {
  std::string expected;
  for (const DType each : allowed) {
    if (each == type) return;
    expected += (expected.empty() ? "" : " or ") + std::string(name_of(each));
  }
  fail(name, expected + " on CUDA", name_of(type));
}

// Vector accesses of 16 bytes start at any row and head.
void check_aligned(const char* name, const FloatArray& array) {
  const int64_t size = size_of(array.type);
  const bool ok = reinterpret_cast<uintptr_t>(array.data) % kVectorBytes == 0 &&
                  array.stride_t * size % kVectorBytes == 0 && array.stride_h * size % kVectorBytes == 0;
  check(ok, name, "data and strides that are multiples of 16 bytes on CUDA",
        "strides " + std::to_string(array.stride_t) + " and " + std::to_string(array.stride_h));
}

void check_states(const StatePool& states, int d_k, int d_v) {
  check_type("states", states.type, {DType::kFloat32, DType::kBFloat16});
  check(d_k == 64 || d_k == 128, "states", "d_k (the last dimension) of 64 or 128 on CUDA", d_k);
  check(d_v % 16 == 0, "states", "d_v a multiple of 16 on CUDA", d_v);
  if (states.stride_k != 1) return;
  const int64_t size = size_of(states.type);
  bool ok = reinterpret_cast<uintptr_t>(states.data) % kVectorBytes == 0;
  for (const int64_t stride : {states.stride_layer, states.stride_slot, states.stride_h, states.stride_v}) {
    ok = ok && stride * size % kVectorBytes == 0;
  }
  check(ok, "states", "data and strides that are multiples of 16 bytes on CUDA",
        "a slot every " + std::to_string(states.stride_slot * size) + " bytes");
}

void check_grid(int64_t bs, int64_t layers = 1) {
  check(bs <= kMaxGrid && layers <= kMaxGrid, "state_indices", "at most 65535 requests and layers",
        std::to_string(bs) + " and " + std::to_string(layers));
}

template <typename Params>
void run(const char* op, const Params& params, const Tensor& like) {
  CudaCall call(like);
  CudaCall::check(op, launch(params, call.stream()));
}

}  // namespace

void run_cuda(const RecurrentVerifyParams& p, const Tensor& like) {
  check_type("q", p.q.type, {DType::kBFloat16});
  check_states(p.states, p.d_k, p.d_v);
  check(p.num_nodes <= kMaxRecurrentNodes, "q", "at most 64 nodes per request on CUDA", std::to_string(p.num_nodes));
  check_aligned("q", p.q);
  check_aligned("k", p.k);
  check_aligned("v", p.v);
  check_aligned("o", p.o);
  check_aligned("k_kept", {p.k_kept, p.k.type});
  check_grid(p.bs);
  if (p.bs > 0) run("ddtree_recurrent_verify", p, like);
}

void run_cuda(const RecurrentCommitParams& p, const Tensor& like) {
  check_type("k_kept", p.k.type, {DType::kBFloat16});
  check_aligned("k_kept", {p.k.data, p.k.type, p.k_stride_layer, 0});
  check_aligned("u_kept", {p.u, DType::kFloat32, p.u_stride_layer, 0});
  check_states(p.states, p.d_k, p.d_v);
  check_grid(p.bs, p.layers);
  if (p.bs > 0 && p.layers > 0) run("ddtree_recurrent_commit", p, like);
}

void run_cuda(const ConvVerifyParams& p, const Tensor& like) {
  check(p.dim * size_of(p.x.type) % kVectorBytes == 0, "x", "a multiple of 16 bytes of channels on CUDA",
        std::to_string(p.dim) + " channels");
  check_aligned("x", {p.x.data, p.x.type, p.x.stride_t, 0});
  check_aligned("out", {p.out.data, p.out.type, p.out.stride_t, 0});
  check_aligned("x_kept", {p.x_kept, p.x.type});
  check_aligned("weight", {p.weight.data, p.weight.type});
  check_aligned("bias", {p.bias.data, p.bias.type});
  check_grid(p.bs);
  if (p.bs > 0) run("ddtree_conv_verify", p, like);
}

void run_cuda(const ConvCommitParams& p, const Tensor& like) {
  check_grid(p.bs, p.layers);
  if (p.bs > 0 && p.layers > 0) run("ddtree_conv_commit", p, like);
}

}  // namespace ddtree
