// Runs the draft-tree kernels against the reference, without torch: for compute-sanitizer (tests/sanitize.sh) and for
// the first run on a new card. Prints what differs; exits with the number of cases that do.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "tree/launch.h"
#include "tree/reference.h"

using namespace ddtree;

namespace {

std::mt19937 rng(0);

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(100);
}

// An array on the host and on the device. Outputs differ until the op writes them: the host's hold 0x55, the device's
// are not initialized, so that initcheck sees what is read of them.
template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(std::vector<T> values, bool upload = true) : host(std::move(values)) {
    check(cudaMalloc(&device, std::max<size_t>(bytes(), 1)));
    if (upload) check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  static Array output(size_t count) {
    Array array(std::vector<T>(count), false);
    std::memset(array.host.data(), 0x55, array.bytes());
    return array;
  }
  Array(Array&& other) : host(std::move(other.host)), device(other.device) { other.device = nullptr; }
  ~Array() { cudaFree(device); }

  size_t bytes() const { return host.size() * sizeof(T); }
  T* at(bool on_device) { return on_device ? device : host.data(); }
  bool equal() const {
    std::vector<T> got(host.size());
    check(cudaMemcpy(got.data(), device, bytes(), cudaMemcpyDeviceToHost));
    return got == host;
  }
};

template <typename T>
std::vector<T> filled(size_t count, const std::function<T()>& next) {
  std::vector<T> values(count);
  std::generate(values.begin(), values.end(), next);
  return values;
}

// Build, accept and commit in turn, on both sides. Returns whether all of it is equal.
bool run(int b, int L, int K, int N, bool keep_spine, int row_bytes) {
  const int words = (N + kWordBits - 1) / kWordBits, D = std::min(L + 1, N), buffers = 3, hidden_bytes = 2 * row_bytes;
  std::vector<float> sorted = filled<float>(size_t(b) * L * K, [] { return -float(rng() % 64) / 8; });
  for (size_t i = 0; i < sorted.size(); i += K) std::sort(&sorted[i], &sorted[i] + K, std::greater<float>());
  std::vector<int64_t> token_values(sorted.size());
  for (size_t i = 0; i < token_values.size(); ++i) token_values[i] = i % K + 1;

  Array<int64_t> candidates(token_values), bonus(std::vector<int64_t>(b, 7)), prefix(std::vector<int64_t>(b, 100));
  Array<float> log_probs(sorted), log_sum(std::vector<float>(size_t(b) * L, 0.25f));
  Array<int32_t> budget(filled<int32_t>(b, [&] { return int32_t(rng() % (N + 2)); }));
  const size_t rows = size_t(b) * N;
  auto tokens = Array<int64_t>::output(rows), positions = Array<int64_t>::output(rows);
  auto parents = Array<int32_t>::output(rows), depths = Array<int32_t>::output(rows),
       first_child = Array<int32_t>::output(rows), next_sibling = Array<int32_t>::output(rows),
       num_rows = Array<int32_t>::output(b), lengths = Array<int32_t>::output(b);
  auto ancestors = Array<uint64_t>::output(rows * words);
  // The target says a low candidate at each row: paths of some length.
  Array<int64_t> target(filled<int64_t>(rows, [&] { return int64_t(rng() % std::min(K, 2) + 1); }));
  auto path = Array<int64_t>::output(size_t(b) * D), output = Array<int64_t>::output(size_t(b) * D),
       next_bonus = Array<int64_t>::output(b);

  std::vector<int64_t> slot_values(rows);
  std::iota(slot_values.begin(), slot_values.end(), 0);
  std::shuffle(slot_values.begin(), slot_values.end(), rng);
  Array<int64_t> slots(slot_values);
  const auto bytes = [&](size_t count) { return filled<char>(count, [] { return char(rng()); }); };
  std::vector<Array<char>> pool;
  for (int n = 0; n < buffers; ++n) pool.emplace_back(bytes(rows * row_bytes));
  Array<char> hidden(bytes(rows * hidden_bytes));
  auto hidden_out = Array<char>::output(size_t(b) * D * hidden_bytes);

  std::vector<KVBuffer> device_table;
  for (auto& buffer : pool) device_table.push_back({buffer.device, row_bytes, row_bytes});
  KVBuffer* table = nullptr;
  check(cudaMalloc(&table, buffers * sizeof(KVBuffer)));
  check(cudaMemcpy(table, device_table.data(), buffers * sizeof(KVBuffer), cudaMemcpyHostToDevice));
  std::vector<KVBuffer> host_table;
  for (auto& buffer : pool) host_table.push_back({buffer.host.data(), row_bytes, row_bytes});

  for (const bool d : {false, true}) {
    BuildParams build{};
    build.candidates = candidates.at(d);
    build.log_probs = log_probs.at(d);
    build.log_sum = log_sum.at(d);
    build.bonus = bonus.at(d);
    build.budget = budget.at(d);
    build.prefix_lens = prefix.at(d);
    build.tokens = tokens.at(d);
    build.parents = parents.at(d);
    build.depths = depths.at(d);
    build.ancestors = ancestors.at(d);
    build.first_child = first_child.at(d);
    build.next_sibling = next_sibling.at(d);
    build.num_rows = num_rows.at(d);
    build.positions = positions.at(d);
    build.b = b;
    build.depth = L;
    build.candidates_per_position = K;
    build.rows = N;
    build.words = words;
    build.keep_spine = keep_spine;

    AcceptParams accept{};
    accept.tokens = tokens.at(d);
    accept.parents = parents.at(d);
    accept.target = target.at(d);
    accept.path = path.at(d);
    accept.output = output.at(d);
    accept.lengths = lengths.at(d);
    accept.bonus = next_bonus.at(d);
    accept.b = b;
    accept.rows = N;
    accept.max_length = D;

    CommitParams commit{};
    commit.path = path.at(d);
    commit.lengths = lengths.at(d);
    commit.slots = slots.at(d);
    commit.buffers = d ? table : host_table.data();
    commit.hidden = hidden.at(d);
    commit.hidden_out = hidden_out.at(d);
    commit.max_row_bytes = row_bytes;
    commit.hidden_bytes = hidden_bytes;
    commit.b = b;
    commit.rows = N;
    commit.max_length = D;
    commit.num_buffers = buffers;

    if (d) {
      launch_build(build, nullptr);
      check(cudaGetLastError());
      launch_accept(accept, nullptr);
      check(cudaGetLastError());
      launch_commit(commit, nullptr);
      check(cudaGetLastError());
      check(cudaDeviceSynchronize());
    } else {
      reference_build(build);
      reference_accept(accept);
      reference_commit(commit);
    }
  }
  cudaFree(table);
  bool equal = tokens.equal() && parents.equal() && depths.equal() && ancestors.equal() && first_child.equal() &&
               next_sibling.equal() && num_rows.equal() && positions.equal() && path.equal() && output.equal() &&
               lengths.equal() && next_bonus.equal() && hidden_out.equal();
  for (auto& buffer : pool) equal = equal && buffer.equal();
  return equal;
}

}  // namespace

int main() {
  int cases = 0, failed = 0;
  for (const bool keep_spine : {false, true}) {
    for (const int N : {1, 2, 20, 32, 33, 64, 100, 128, 256}) {
      for (const int K : {1, 5, 32}) {
        for (const int row_bytes : {1152, 4096 + 48, 13}) {
          const int b = 2, L = N % 3 == 0 ? 32 : 7;
          ++cases;
          if (run(b, L, K, N, keep_spine, row_bytes)) continue;
          ++failed;
          std::printf("FAIL L %d K %d N %d row %d bytes%s\n", L, K, N, row_bytes, keep_spine ? ", spine" : "");
        }
      }
    }
  }
  std::printf("%d cases, %d differ from the reference\n", cases, failed);
  return std::min(failed, 99);
}
