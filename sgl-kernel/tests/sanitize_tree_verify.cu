// Runs a small case of every tree-verify kernel instantiation against the CPU reference, without torch. It is meant for
// compute-sanitizer (sanitize.sh), and is also a quick first test on a new card. Slots that no request names and the
// workspace are never initialized, so initcheck reports any read of them.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/float_types.h"
#include "tree_verify/dispatch.h"
#include "tree_verify/reference.h"

using namespace ddtree;

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

// Bytes on the host and their copy on the device.
struct Buffer {
  std::vector<char> host;
  void* device = nullptr;

  explicit Buffer(size_t bytes) : host(bytes) { check(cudaMalloc(&device, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  template <typename T>
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
    std::memcpy(host.data(), values.data(), host.size());
    upload(0, host.size());
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(device); }

  void upload(size_t offset, size_t bytes) {
    check(cudaMemcpy(static_cast<char*>(device) + offset, host.data() + offset, bytes, cudaMemcpyHostToDevice),
          "upload");
  }
};

int bytes_of(DType type) { return type == DType::kFloat8E4M3 ? 1 : 2; }

struct Shape {
  DType q_dtype, kv_dtype;
  int d_qk, d_v, h_q, num_nodes, num_splits;
  bool options;  // sliding window, cap, sinks, scales
  int prefix = 45;
  bool draft_block = false;  // every node sees all others, as in a drafter's block
  int page_size = 1;
  int h_kv = 1;
};

std::string describe(const Shape& s) {
  char text[128];
  std::snprintf(text, sizeof text, "q %s, KV %s, head size %d, %d nodes%s x %d/%d heads, %d splits, pages of %d",
                s.q_dtype == DType::kBFloat16 ? "bf16" : "fp16", s.kv_dtype == DType::kFloat8E4M3 ? "fp8" : "as q",
                s.d_qk, s.num_nodes, s.draft_block ? " of a draft block" : "", s.h_q, s.h_kv, s.num_splits,
                s.page_size);
  return text;
}

std::mt19937 rng(0);

void store(DType type, char* out, int64_t i, float value) {
  const uint16_t bits = type == DType::kBFloat16 ? BFloat16::round(value).bits : Float16::round(value).bits;
  std::memcpy(out + 2 * i, &bits, 2);
}

// Random values with magnitude below 2, in any of the types.
void fill(DType type, char* out, int64_t count) {
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (int64_t i = 0; i < count; ++i) {
    if (type == DType::kFloat8E4M3) {
      out[i] = static_cast<char>((rng() & 0x80) | rng() % 0x40);
    } else {
      store(type, out, i, uniform(rng));
    }
  }
}

float load(DType type, const char* in, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, in + 2 * i, 2);
  return type == DType::kBFloat16 ? float{BFloat16{bits}} : float{Float16{bits}};
}

// Rounds rows of d values to e4m3, with the power of two as their scale that brings them below 256.
void round_rows(DType type, std::vector<char>& rows, int d) {
  for (int64_t row = 0; row < int64_t(rows.size() / 2); row += d) {
    float top = 0;
    for (int i = 0; i < d; ++i) top = std::max(top, std::fabs(load(type, rows.data(), row + i)));
    const int scale = 7 - std::ilogb(top);
    for (int i = 0; i < d; ++i) {
      const float value = std::ldexp(load(type, rows.data(), row + i), scale);
      const int last_bit = std::max(std::ilogb(value), -6) - 3;  // of three bits of mantissa; -6: the smallest exponent
      store(type, rows.data(), row + i, std::ldexp(std::nearbyint(std::ldexp(value, -last_bit)), last_bit - scale));
    }
  }
}

// Runs one launch. Returns the largest difference from the reference, relative to the largest value of O, or infinity
// if an LSE is further off than `lse_error`. `rounds_q`: the kernel rounds Q to e4m3, so the reference gets that Q.
double run(const Shape& s, double lse_error, bool rounds_q) {
  const bool mla = s.d_qk == kMlaQkDim;
  const int h_kv = s.h_kv, bs = 3, words = ancestor_words(s.num_nodes);
  const std::vector<int32_t> sizes = {s.num_nodes, 0, 2}, prefix = {s.prefix, 7, 0};
  const int total = s.num_nodes + 2;
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, kv_indices, tree_slots;
  std::vector<int32_t> pages((s.num_nodes + s.prefix) / s.page_size + 15);  // some that no request names
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), rng);
  const int num_slots = int(pages.size()) * s.page_size;
  int next_page = 0;
  for (int r = 0; r < bs; ++r) {
    qo_indptr.push_back(qo_indptr.back() + sizes[r]);
    kv_indptr.push_back(kv_indptr.back() + prefix[r]);
    for (int token = 0; token < prefix[r] + sizes[r]; ++token) {
      const int slot = pages[next_page + token / s.page_size] * s.page_size + token % s.page_size;
      (token < prefix[r] ? kv_indices : tree_slots).push_back(slot);
    }
    next_page += (prefix[r] + sizes[r] + s.page_size - 1) / s.page_size;
  }
  std::vector<bool> named(num_slots + 1, false);  // of a request that has nodes
  for (int r = 0; r < bs; ++r) {
    if (sizes[r] == 0) continue;
    for (int i = kv_indptr[r]; i < kv_indptr[r + 1]; ++i) named[kv_indices[i]] = true;
    for (int i = qo_indptr[r]; i < qo_indptr[r + 1]; ++i) named[tree_slots[i]] = true;
  }
  std::vector<uint64_t> ancestors(int64_t{total} * words, 0);
  for (int r = 0; r < bs; ++r) {
    for (int i = 0; i < sizes[r]; ++i) {
      uint64_t* row = &ancestors[int64_t{qo_indptr[r] + i} * words];
      if (i > 0) std::copy_n(&ancestors[int64_t{qo_indptr[r]} * words + int64_t(rng() % i) * words], words, row);
      row[i / kAncestorWordBits] |= ancestor_bit(i);
      for (int j = 0; s.draft_block && j < sizes[r]; ++j) row[j / kAncestorWordBits] |= ancestor_bit(j);
    }
  }

  Buffer q(int64_t{total} * s.h_q * s.d_qk * 2), o(int64_t{total} * s.h_q * s.d_v * 2), lse(int64_t{total} * s.h_q * 4);
  fill(s.q_dtype, q.host.data(), q.host.size() / 2);
  q.upload(0, q.host.size());
  const auto cache_bytes = [&](int d) { return int64_t{num_slots} * h_kv * d * bytes_of(s.kv_dtype); };
  Buffer k(cache_bytes(s.d_qk)), v(mla ? 0 : cache_bytes(s.d_v));
  for (Buffer* cache : {&k, &v}) {
    const size_t bytes = cache->host.size() / num_slots;
    fill(s.kv_dtype, cache->host.data(), cache->host.size() / bytes_of(s.kv_dtype));
    for (int slot = 0, first = 0; slot <= num_slots; ++slot) {
      if (named[slot]) continue;
      if (bytes > 0 && slot > first) cache->upload(first * bytes, (slot - first) * bytes);
      first = slot + 1;
    }
  }
  Buffer qo_indptr_(qo_indptr), kv_indptr_(kv_indptr), kv_indices_(kv_indices), prefix_(prefix), tree_(tree_slots),
      ancestors_(ancestors), sinks(std::vector<float>(s.h_q, 0.5f)), scale(std::vector<float>{0.75f});

  TreeVerifyParams p{};
  p.q_stride_t = int64_t{s.h_q} * s.d_qk;
  p.q_stride_h = s.d_qk;
  p.o_stride_t = int64_t{s.h_q} * s.d_v;
  p.o_stride_h = s.d_v;
  p.k_stride_h = s.d_qk;
  p.v_stride_h = mla ? s.d_qk : s.d_v;
  p.k_stride_slot = h_kv * p.k_stride_h;
  p.v_stride_slot = h_kv * p.v_stride_h;
  p.num_slots = num_slots;
  p.page_size = s.page_size;
  p.sm_scale = 1.0f / std::sqrt(static_cast<float>(s.d_qk));
  p.logit_cap = s.options ? 8.0f : 0.0f;
  p.sliding_window = s.options ? 21 : -1;
  p.bs = bs;
  p.total_rows = total;
  p.num_nodes = s.num_nodes;
  p.words = words;
  p.h_q = s.h_q;
  p.h_kv = h_kv;
  p.d_qk = s.d_qk;
  p.d_v = s.d_v;
  p.num_splits = s.num_splits;
  p.q_dtype = s.q_dtype;
  p.kv_dtype = s.kv_dtype;
  const auto point = [&](auto at) {
    p.q = at(q);
    p.o = at(o);
    p.lse = static_cast<float*>(at(lse));
    p.k_cache = at(k);
    p.v_cache = mla ? p.k_cache : at(v);
    p.qo_indptr = static_cast<const int32_t*>(at(qo_indptr_));
    p.kv_indptr = static_cast<const int32_t*>(at(kv_indptr_));
    p.kv_indices = at(kv_indices_);
    p.prefix_lens = static_cast<const int32_t*>(at(prefix_));
    p.tree_slots = at(tree_);
    p.ancestors = static_cast<const uint64_t*>(at(ancestors_));
    p.sinks = s.options && !mla ? static_cast<const float*>(at(sinks)) : nullptr;
    p.k_scale = p.v_scale = s.kv_dtype == DType::kFloat8E4M3 ? static_cast<const float*>(at(scale)) : nullptr;
  };

  point([](Buffer& buffer) { return buffer.device; });
  p.workspace_bytes = workspace_bytes(p);
  Buffer workspace(p.workspace_bytes);
  p.workspace = workspace.device;
  const std::string name = describe(s);
  check(mla ? launch_mla(p, nullptr) : launch_gqa(p, nullptr), name.c_str());
  check(cudaDeviceSynchronize(), name.c_str());
  std::vector<char> got_o(o.host.size()), got_lse(lse.host.size());
  check(cudaMemcpy(got_o.data(), o.device, got_o.size(), cudaMemcpyDeviceToHost), "download");
  check(cudaMemcpy(got_lse.data(), lse.device, got_lse.size(), cudaMemcpyDeviceToHost), "download");

  if (rounds_q) round_rows(s.q_dtype, q.host, s.d_qk);
  point([](Buffer& buffer) { return static_cast<void*>(buffer.host.data()); });
  if (const std::string error = check_values(p, kv_indices.size()); !error.empty()) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.c_str());
    std::exit(2);
  }
  reference_run(p, 0, reference_num_items(p));
  double largest = 0, difference = 0;
  for (int64_t i = 0; i < int64_t{total} * s.h_q * s.d_v; ++i) {
    const double want = load(s.q_dtype, o.host.data(), i), got = load(s.q_dtype, got_o.data(), i);
    largest = std::max(largest, std::fabs(want));
    difference = std::isnan(got) ? INFINITY : std::max(difference, std::fabs(want - got));
  }
  for (int64_t i = 0; i < int64_t{total} * s.h_q; ++i) {
    float want, got;
    std::memcpy(&want, lse.host.data() + 4 * i, 4);
    std::memcpy(&got, got_lse.data() + 4 * i, 4);
    if (std::fabs(want - got) <= lse_error) continue;
    std::printf("LSE %zd is %g, expected %g\n", ssize_t(i), got, want);
    difference = INFINITY;
  }
  return difference / largest;
}

// What kernels do with fp8 KV: convert it to 16 bits, which is exact, or multiply in fp8, with P rounded or split.
enum class Fp8 { kConverts, kRounds, kSplits };

// Runs every instantiation. Returns the number of failures.
int run_all(const char* kernels, Fp8 fp8) {
  int failed = 0, launches = 0;
  for (DType q_dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (DType kv_dtype : {q_dtype, DType::kFloat8E4M3}) {
      for (int num_splits : {1, 3}) {
        std::vector<Shape> shapes;
        const bool options = num_splits == 3;
        for (int d : kGqaHeadSizes) {
          // With two heads per KV head, 6, 40 and 80 packed rows use the three tile heights.
          for (int nodes : {3, 20, 40}) shapes.push_back({q_dtype, kv_dtype, d, d, 2, nodes, num_splits, options});
        }
        for (int nodes : {20, 40})
          shapes.push_back({q_dtype, kv_dtype, 64, 64, 2, nodes, 1, options, 700});  // stages used again
        shapes.push_back({q_dtype, kv_dtype, kMlaQkDim, kMlaVDim, 4, 5, num_splits, options});
        shapes.push_back({q_dtype, kv_dtype, kMlaQkDim, kMlaVDim, 4, 20, num_splits, options});
        shapes.push_back({q_dtype, kv_dtype, kMlaQkDim, kMlaVDim, 1, 220, num_splits, options});  // stages used again
        // Nodes of one block of rows see those of another.
        for (int d : kGqaHeadSizes) shapes.push_back({q_dtype, kv_dtype, d, d, 2, 150, num_splits, options, 45, true});
        shapes.push_back({q_dtype, kv_dtype, kMlaQkDim, kMlaVDim, 4, 70, num_splits, options, 45, true});
        if (num_splits == 1) {  // loads by page
          for (int d : kGqaHeadSizes) {
            for (int nodes : {20, 40}) shapes.push_back({q_dtype, kv_dtype, d, d, 2, nodes, 1, false, 700, false, 64});
          }
          shapes.push_back({q_dtype, kv_dtype, kMlaQkDim, kMlaVDim, 4, 20, 1, false, 700, false, 64});
          for (int page_size : {1, 64}) {  // blocks with several tasks
            for (int d : {64, 128})
              shapes.push_back({q_dtype, kv_dtype, d, d, 200, 40, 1, false, 300, false, page_size, 100});
          }
        }
        for (const Shape& shape : shapes) {
          ++launches;
          const Fp8 how = kv_dtype == DType::kFloat8E4M3 ? fp8 : Fp8::kConverts;
          // The accumulators of fp8 products keep about 14 bits. Rounding a probability costs at most 2^-4 of it.
          const double error = run(shape, how == Fp8::kConverts ? 1e-3 : 4e-3, how == Fp8::kRounds);
          const double converted = q_dtype == DType::kBFloat16 ? 1e-2 : 2e-3;
          const double allowed = how == Fp8::kConverts ? converted : how == Fp8::kSplits ? 1e-2 : 5e-2;
          if (error <= allowed) continue;
          ++failed;
          std::printf("FAIL %s, %s: %.2e off, allowed %.0e\n", kernels, describe(shape).c_str(), error, allowed);
        }
      }
    }
  }
  std::printf("%s: %d launches, %d failed\n", kernels, launches, failed);
  return failed;
}

}  // namespace

// Without arguments, runs all kernels. The arguments "own", "exact" and "common" select some of them.
int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) {
    return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* one) { return std::strcmp(one, name) == 0; });
  };
  int major = 0, failed = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
  if (major == 9) {
    setenv("SGLANG_DDTREE_SM90", "1", 1);
    setenv("SGLANG_DDTREE_FP8", "fast", 1);
    if (wanted("own")) failed += run_all("sm_90's own kernels", Fp8::kRounds);
    setenv("SGLANG_DDTREE_FP8", "exact", 1);
    if (wanted("exact")) failed += run_all("sm_90's own kernels, exact fp8", Fp8::kSplits);
  }
  setenv("SGLANG_DDTREE_SM90", "0", 1);
  setenv("SGLANG_DDTREE_FP8", "fast", 1);
  if (wanted("common")) failed += run_all("common kernels", major == 10 ? Fp8::kConverts : Fp8::kRounds);
  setenv("SGLANG_DDTREE_FP8", "exact", 1);
  if (wanted("common")) failed += run_all("common kernels, exact fp8", Fp8::kConverts);
  return failed ? 1 : 0;
}
