// Runs the draft-tree kernels against the CPU reference, without torch, for compute-sanitizer (sanitize.sh) and as a
// first test on a new card. Prints the cases that differ and exits with their number.
#include <numeric>
#include <random>

#include "device_array.h"
#include "tree/launch.h"
#include "tree/reference.h"

using namespace ddtree;

namespace {

std::mt19937 rng(0);

enum Kind { kMarginals, kPairs, kBeam };

// Runs build, accept and commit in turn on both sides. Returns whether all outputs are equal.
bool run(Kind kind, int bs, int D, int K, int N, bool keep_top1_path, int row_bytes) {
  const int words = ancestor_words(N), F = std::min(D + 1, N), buffers = 3, hidden_bytes = 2 * row_bytes;
  const int W = kind == kMarginals ? 0 : kind == kPairs ? K : kMaxPaths;
  const auto log_prob = [] { return -float(rng() % 64) / 8; };
  std::vector<float> sorted = filled<float>(size_t(bs) * D * std::max(W, 1) * K, log_prob);
  if (kind == kMarginals) {
    for (size_t i = 0; i < sorted.size(); i += K) std::sort(&sorted[i], &sorted[i] + K, std::greater<float>());
  }
  std::vector<int64_t> token_values(size_t(bs) * D * K);
  for (size_t i = 0; i < token_values.size(); ++i) token_values[i] = i % K + 1;

  Array<int64_t> candidates(token_values), bonus(std::vector<int64_t>(bs, 7));
  Array<float> log_probs(sorted), log_sum(std::vector<float>(size_t(bs) * D, 0.25f));
  // Mostly the children of the first rows, so that some are nodes.
  Array<int32_t> beam(filled<int32_t>(size_t(bs) * D * std::max(W, 1), [&] { return int32_t(rng() % (4 * K)) - 1; }));
  const size_t nodes = size_t(bs) * N;
  auto tokens = Array<int64_t>::output(nodes);
  auto parents = Array<int32_t>::output(nodes), depths = Array<int32_t>::output(nodes),
       first_child = Array<int32_t>::output(nodes), next_sibling = Array<int32_t>::output(nodes),
       sizes = Array<int32_t>::output(bs), lengths = Array<int32_t>::output(bs);
  auto ancestors = Array<uint64_t>::output(nodes * words);
  auto scores = Array<float>::output(nodes);
  // The target picks a low rank at each node, which gives paths of some length.
  Array<int64_t> target(filled<int64_t>(nodes, [&] { return int64_t(rng() % std::min(K, 2) + 1); }));
  auto path = Array<int64_t>::output(size_t(bs) * F), output = Array<int64_t>::output(size_t(bs) * F),
       next_bonus = Array<int64_t>::output(bs);

  std::vector<int64_t> slot_values(nodes);
  std::iota(slot_values.begin(), slot_values.end(), 0);
  std::shuffle(slot_values.begin(), slot_values.end(), rng);
  Array<int64_t> slots(slot_values);
  const auto bytes = [&](size_t count) { return filled<char>(count, [] { return char(rng()); }); };
  std::vector<Array<char>> pool;
  for (int n = 0; n < buffers; ++n) pool.emplace_back(bytes(nodes * row_bytes));
  Array<char> hidden(bytes(nodes * hidden_bytes));
  auto hidden_out = Array<char>::output(size_t(bs) * F * hidden_bytes);

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
    build.log_sum = kind == kMarginals ? log_sum.at(d) : nullptr;
    build.beam = kind == kBeam ? beam.at(d) : nullptr;
    build.bonus = bonus.at(d);
    build.tokens = tokens.at(d);
    build.parents = parents.at(d);
    build.depths = depths.at(d);
    build.ancestors = ancestors.at(d);
    build.first_child = first_child.at(d);
    build.next_sibling = next_sibling.at(d);
    build.sizes = sizes.at(d);
    build.scores = scores.at(d);
    build.bs = bs;
    build.max_depth = D;
    build.num_paths = W;
    build.num_candidates = K;
    build.num_nodes = N;
    build.words = words;
    build.keep_top1_path = keep_top1_path;

    AcceptParams accept{};
    accept.tokens = tokens.at(d);
    accept.parents = parents.at(d);
    accept.target = target.at(d);
    accept.path = path.at(d);
    accept.output = output.at(d);
    accept.lengths = lengths.at(d);
    accept.bonus = next_bonus.at(d);
    accept.bs = bs;
    accept.num_nodes = N;
    accept.block_size = F;

    CommitParams commit{};
    commit.path = path.at(d);
    commit.lengths = lengths.at(d);
    commit.slots = slots.at(d);
    commit.buffers = d ? table : host_table.data();
    commit.hidden = hidden.at(d);
    commit.hidden_out = hidden_out.at(d);
    commit.max_row_bytes = row_bytes;
    commit.hidden_bytes = hidden_bytes;
    commit.bs = bs;
    commit.num_nodes = N;
    commit.block_size = F;
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
               next_sibling.equal() && sizes.equal() && scores.equal() && path.equal() && output.equal() &&
               lengths.equal() && next_bonus.equal() && hidden_out.equal();
  for (auto& buffer : pool) equal = equal && buffer.equal();
  return equal;
}

}  // namespace

int main() {
  int cases = 0, failed = 0;
  for (const bool keep_top1_path : {false, true}) {
    for (const int N : {1, 2, 20, 32, 33, 64, 100, 128, 256}) {
      for (const int K : {1, 5, 32}) {
        for (const int row_bytes : {1152, 4096 + 48, 13}) {
          const int bs = 2, D = N % 3 == 0 ? 32 : 7;
          for (const Kind kind : {kMarginals, kPairs, kBeam}) {
            ++cases;
            if (run(kind, bs, D, K, N, keep_top1_path, row_bytes)) continue;
            ++failed;
            std::printf("FAIL kind %d D %d K %d N %d row %d bytes%s\n", kind, D, K, N, row_bytes,
                        keep_top1_path ? ", top-1 path" : "");
          }
        }
      }
    }
  }
  std::printf("%d cases, %d differ from the reference\n", cases, failed);
  return std::min(failed, 99);
}
