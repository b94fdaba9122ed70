// Runs the kernels for recurrent layers against the CPU reference, without torch, for compute-sanitizer (sanitize.sh)
// and as a first test on a new card. Prints the cases that differ and exits with their number.
#include <cmath>
#include <random>
#include <string>

#include "common/float_types.h"
#include "device_array.h"
#include "tree_recurrent/launch.h"
#include "tree_recurrent/reference.h"

using namespace ddtree;

namespace {

std::mt19937 rng(0);
constexpr double kTolerance = 0.02;  // relative to 1 + the value; bf16 results round by 0.004

float normal() { return std::normal_distribution<float>()(rng); }

template <typename T>
std::vector<T> normals(size_t count, float scale = 1) {
  return filled<T>(count, [&] {
    if constexpr (std::is_same_v<T, float>) return scale * normal();
    if constexpr (!std::is_same_v<T, float>) return T::round(scale * normal());
  });
}

template <typename T>
constexpr DType type_of() {
  return std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16;
}

// The largest difference between the sides, relative to 1 + the host's value. NaN counts as equal to NaN only.
template <typename T>
double difference(const Array<T>& array) {
  std::vector<T> got(array.host.size());
  check(cudaMemcpy(got.data(), array.device, array.bytes(), cudaMemcpyDeviceToHost));
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double want = array.host[i], value = got[i];
    if (std::isnan(want) && std::isnan(value)) continue;
    const double error = std::fabs(value - want) / (1 + std::fabs(want));
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

struct Result {
  const char* name;
  double error;
};

int report(const std::string& title, const std::vector<Result>& results) {
  bool failed = false;
  for (const Result& result : results) failed = failed || !(result.error <= kTolerance);
  std::printf("%s %s:", failed ? "DIFFERS" : "equal", title.c_str());
  for (const Result& result : results) std::printf(" %s %.2g", result.name, result.error);
  std::printf("\n");
  return failed;
}

// Random trees: every node's ancestor words, and a path in each.
struct Trees {
  std::vector<uint64_t> ancestors;
  std::vector<int64_t> path;
  std::vector<int32_t> lengths;
};

Trees random_trees(int bs, int N, int F) {
  Trees trees;
  for (int r = 0; r < bs; ++r) {
    std::vector<std::vector<int64_t>> paths;
    for (int n = 0; n < N; ++n) {
      std::vector<int64_t> path;
      if (n > 0) path = paths[n - 1 - rng() % std::min(n, 3)];
      if (int(path.size()) == F) path.resize(1);
      path.push_back(n);
      uint64_t mask = 0;
      for (const int64_t node : path) mask |= uint64_t{1} << node;
      trees.ancestors.push_back(mask);
      paths.push_back(path);
    }
    std::vector<int64_t> chosen = paths[rng() % N];
    trees.lengths.push_back(int32_t(chosen.size()));
    chosen.resize(F);
    trees.path.insert(trees.path.end(), chosen.begin(), chosen.end());
  }
  return trees;
}

template <typename State>
int run_recurrent(RecurrentKind kind, int bs, int N, int h_k, int h_v, int d_k, int d_v) {
  const int F = 33, slots = bs + 2;
  const bool channel = kind == RecurrentKind::kChannelDelta;
  const size_t rows = size_t(bs) * N, gates = rows * h_v * (channel ? d_k : 1);
  Trees trees = random_trees(bs, N, F);
  Array<uint64_t> ancestors(trees.ancestors);
  Array<int64_t> path(trees.path);
  Array<int32_t> lengths(trees.lengths);
  std::vector<int32_t> index_values, track_values, position_values;
  for (int r = 0; r < bs; ++r) {
    index_values.push_back(r == 1 ? -1 : r);  // one request without a slot
    track_values.push_back(r == 0 ? bs : -1);
    position_values.push_back(trees.lengths[r] / 2);
  }
  Array<int32_t> indices(index_values), track(track_values), positions(position_values);
  Array<BFloat16> q(normals<BFloat16>(rows * h_k * d_k, 0.5f)), k(normals<BFloat16>(rows * h_k * d_k, 0.5f)),
      v(normals<BFloat16>(rows * h_v * d_v)), gate(normals<BFloat16>(gates)), beta(normals<BFloat16>(rows * h_v));
  const bool negative = kind == RecurrentKind::kStateSpace;
  Array<float> decay(filled<float>(h_v, [&] { return (negative ? -1 : 1) * std::fabs(normal()); })),
      bias(normals<float>(channel ? h_v * d_k : h_v)), skip(normals<float>(h_v));
  Array<State> states(normals<State>(size_t(slots) * h_v * d_v * d_k, 0.3f));
  Array<BFloat16> o{std::vector<BFloat16>(rows * h_v * d_v)}, k_kept{std::vector<BFloat16>(rows * h_k * d_k)};
  Array<float> u_kept{std::vector<float>(rows * h_v * d_v)}, g_kept{std::vector<float>(gates)};

  for (const bool d : {false, true}) {
    const auto rows_of = [](const void* data, int heads, int size) {
      return FloatArray{data, DType::kBFloat16, int64_t(heads) * size, size};
    };
    RecurrentVerifyParams p{};
    p.q = rows_of(q.at(d), h_k, d_k), p.k = rows_of(k.at(d), h_k, d_k), p.v = rows_of(v.at(d), h_v, d_v);
    p.o = rows_of(o.at(d), h_v, d_v);
    if (kind != RecurrentKind::kFixedDecay) p.gate = rows_of(gate.at(d), h_v, channel ? d_k : 1);
    p.beta = rows_of(beta.at(d), h_v, 1);
    p.decay = {decay.at(d), DType::kFloat32, 0, 1};
    p.bias = {bias.at(d), DType::kFloat32, 0, channel ? d_k : 1};
    if (negative) p.skip = {skip.at(d), DType::kFloat32, 0, 1};
    const int64_t head = int64_t(d_v) * d_k;
    p.states = {states.at(d), type_of<State>(), 0, h_v * head, head, d_k, 1};
    p.state_indices = {indices.at(d), false};
    p.ancestors = ancestors.at(d);
    p.k_kept = k_kept.at(d), p.u_kept = u_kept.at(d), p.g_kept = g_kept.at(d);
    p.kind = kind, p.scale = 0.1f, p.normalize = true;
    p.bs = bs, p.num_nodes = N, p.words = 1, p.h_k = h_k, p.h_v = h_v, p.d_k = d_k, p.d_v = d_v;
    p.heads_per_key = h_v / h_k;

    RecurrentCommitParams c{};
    c.states = p.states, c.state_indices = p.state_indices, c.path = path.at(d), c.lengths = lengths.at(d);
    c.k = {k_kept.at(d), DType::kBFloat16, 0, 0}, c.u = u_kept.at(d), c.g = g_kept.at(d);
    c.track_indices = {track.at(d), false}, c.track_positions = {positions.at(d), false};
    c.per_channel = channel, c.layers = 1, c.bs = bs, c.num_nodes = N, c.block_size = F;
    c.h_k = h_k, c.h_v = h_v, c.d_k = d_k, c.d_v = d_v, c.heads_per_key = h_v / h_k;
    if (d) {
      check(launch(p, nullptr));
      check(launch(c, nullptr));
      check(cudaDeviceSynchronize());
    } else {
      run_reference(p, 0, num_items(p));
      run_reference(c, 0, num_items(c));
    }
  }
  const std::string title = "kind " + std::to_string(int(kind)) + " state of " + std::to_string(sizeof(State)) +
                            " bytes, bs " + std::to_string(bs) + " N " + std::to_string(N) + " heads " +
                            std::to_string(h_k) + "/" + std::to_string(h_v) + " sizes " + std::to_string(d_k) + "/" +
                            std::to_string(d_v);
  return report(title, {{"o", difference(o)},
                        {"u", difference(u_kept)},
                        {"g", difference(g_kept)},
                        {"k", difference(k_kept)},
                        {"states", difference(states)}});
}

int run_conv(int bs, int N, int dim, int width) {
  const int F = 9, slots = bs + 2;
  const size_t rows = size_t(bs) * N;
  Trees trees = random_trees(bs, N, F);
  Array<uint64_t> ancestors(trees.ancestors);
  Array<int64_t> path(trees.path);
  Array<int32_t> lengths(trees.lengths), indices(filled<int32_t>(bs, [i = 0]() mutable { return i++; }));
  Array<BFloat16> x(normals<BFloat16>(rows * dim)), weight(normals<BFloat16>(size_t(dim) * width)),
      window(normals<BFloat16>(size_t(slots) * dim * (width - 1))), out{std::vector<BFloat16>(rows * dim)},
      kept{std::vector<BFloat16>(rows * dim)};
  for (const bool d : {false, true}) {
    ConvVerifyParams p{};
    p.x = {x.at(d), DType::kBFloat16, dim, 1}, p.out = {out.at(d), DType::kBFloat16, dim, 1};
    p.weight = {weight.at(d), DType::kBFloat16, width, 1};
    p.window = {window.at(d), DType::kBFloat16, 0, int64_t(dim) * (width - 1), width - 1, 0, 1};
    p.state_indices = {indices.at(d), false}, p.ancestors = ancestors.at(d), p.x_kept = kept.at(d), p.silu = true;
    p.bs = bs, p.num_nodes = N, p.words = 1, p.dim = dim, p.width = width;
    ConvCommitParams c{};
    c.window = p.window, c.state_indices = p.state_indices, c.path = path.at(d), c.lengths = lengths.at(d);
    c.x = {kept.at(d), DType::kBFloat16, 0, 0}, c.layers = 1, c.bs = bs, c.num_nodes = N, c.block_size = F;
    c.dim = dim, c.width = width;
    if (d) {
      check(launch(p, nullptr));
      check(launch(c, nullptr));
      check(cudaDeviceSynchronize());
    } else {
      run_reference(p, 0, num_items(p));
      run_reference(c, 0, num_items(c));
    }
  }
  return report(
      "convolution, N " + std::to_string(N) + " channels " + std::to_string(dim) + " width " + std::to_string(width),
      {{"out", difference(out)}, {"kept", difference(kept)}, {"window", difference(window)}});
}

}  // namespace

int main() {
  int failed = 0;
  for (const int kind : {0, 1, 2, 3}) {
    for (const int N : {1, 7, 16, 17, 32, 48, 64}) {
      const auto each = static_cast<RecurrentKind>(kind);
      failed += run_recurrent<float>(each, 2, N, 1, 2, 128, 64);
      failed += run_recurrent<BFloat16>(each, 2, N, 1, 2, 64, 48);
    }
    failed += run_recurrent<float>(static_cast<RecurrentKind>(kind), 24, 33, 4, 12, 128, 128);  // no helpers
  }
  for (const int width : {2, 3, 4, 5}) failed += run_conv(3, 21, 264, width);
  std::printf("%d cases differ\n", failed);
  return failed;
}
