// Runs the indexer's kernels against the CPU references, without torch, for compute-sanitizer (sanitize.sh) and as a
// first test on a new card. Prints the cases that differ and exits with their number.
#include <cmath>
#include <random>

#include "common/float_types.h"
#include "device_array.h"
#include "indexer/launch.h"
#include "indexer/reference.h"

using namespace ddtree;

namespace {

std::mt19937 rng(0);

// Requests of `rows` rows with lengths up to `longest`. Returns whether all logits agree and nothing else was written.
bool logits(int bs, int rows, int heads, int page_size, int longest) {
  const int pages_per_request = longest / page_size + 1, num_pages = bs * pages_per_request;
  const int max_len = pages_per_request * page_size, total_rows = bs * rows;
  std::normal_distribution<float> normal;
  const auto bf16 = [&] { return BFloat16::round(normal(rng)).bits; };
  Array<uint16_t> q(filled<uint16_t>(size_t(total_rows) * heads * kIndexHeadDim, bf16));
  Array<uint16_t> keys(filled<uint16_t>(size_t(num_pages) * page_size * kIndexHeadDim, bf16));
  Array<float> weights(filled<float>(size_t(total_rows) * heads, [&] { return normal(rng); }));
  Array<int32_t> seq_lens(filled<int32_t>(total_rows, [&] { return int32_t(rng() % (longest + 1)); }));
  std::vector<int32_t> order(num_pages);
  for (int i = 0; i < num_pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), rng);
  Array<int32_t> page_table(order);
  const float not_written = -7777;
  Array<float> out(std::vector<float>(size_t(total_rows) * max_len, not_written));

  for (const bool d : {false, true}) {
    IndexLogitsParams p{};
    p.q = q.at(d);
    p.keys = keys.at(d);
    p.weights = weights.at(d);
    p.seq_lens = seq_lens.at(d);
    p.page_table = page_table.at(d);
    p.out = out.at(d);
    p.q_stride_row = int64_t{heads} * kIndexHeadDim;
    p.q_stride_head = kIndexHeadDim;
    p.key_stride_page = int64_t{page_size} * kIndexHeadDim;
    p.weight_stride = heads;
    p.table_stride = pages_per_request;
    p.out_stride = max_len;
    p.num_pages = num_pages;
    p.pages_per_request = pages_per_request;
    p.max_len = max_len;
    p.bs = bs;
    p.rows = rows;
    p.heads = heads;
    p.page_size = page_size;
    if (d) {
      check(launch(p, nullptr));
      check(cudaDeviceSynchronize());
    } else {
      reference_run(p, 0, reference_num_items(p));
    }
  }
  std::vector<float> got(out.host.size());
  check(cudaMemcpy(got.data(), out.device, out.bytes(), cudaMemcpyDeviceToHost));
  // Logits of these values are of order sqrt(heads * 128) = 90, and float32 adds 8192 products.
  for (size_t i = 0; i < got.size(); ++i) {
    const bool seen = int64_t(i % max_len) < seq_lens.host[i / max_len];
    if (seen ? !(std::fabs(got[i] - out.host[i]) <= 2e-2f) : got[i] != not_written) return false;
  }
  return true;
}

// A plan of `rows` rows, of which some have no key. Returns whether the keys agree up to their last bit and the rest of
// the pool is untouched.
bool store(int rows, bool decode) {
  const int page_size = 64, num_pages = rows / page_size + 1, num_positions = 1000;
  std::normal_distribution<float> normal;
  std::vector<IndexPlanRow> plan(rows);
  for (int i = 0; i < rows; ++i) {
    plan[i].seq_len = i % 7 == 3 ? -1 : int32_t(rng() % num_positions);
    plan[i].token = static_cast<uint16_t>(decode ? 0xffff : rows - 1 - i);
  }
  std::vector<int64_t> slots(rows);
  for (int i = 0; i < rows; ++i) slots[i] = i;
  std::shuffle(slots.begin(), slots.end(), rng);
  Array<IndexPlanRow> plans(plan);
  Array<int64_t> out_loc(slots);
  Array<float> kv(filled<float>(size_t(rows) * kIndexHeadDim, [&] { return normal(rng); }));
  Array<float> weight(filled<float>(kIndexHeadDim, [&] { return normal(rng); }));
  Array<float> freqs(filled<float>(size_t(num_positions) * kIndexRopeDim, [&] { return normal(rng); }));
  Array<uint16_t> keys(std::vector<uint16_t>(size_t(num_pages) * page_size * kIndexHeadDim, 0x7fc1));  // a NaN

  for (const bool d : {false, true}) {
    StoreIndexKeysParams p{};
    p.kv = kv.at(d);
    p.plan = plans.at(d);
    p.norm_weight = weight.at(d);
    p.freqs = freqs.at(d);
    p.out_loc = out_loc.at(d);
    p.keys = keys.at(d);
    p.kv_stride = kIndexHeadDim;
    p.freq_stride = kIndexRopeDim;
    p.key_stride_page = int64_t{page_size} * kIndexHeadDim;
    p.rows = rows;
    p.num_positions = num_positions;
    p.num_tokens = rows;
    p.num_pages = num_pages;
    p.eps = 1e-6f;
    p.page_size = page_size;
    p.decode = decode;
    if (d) {
      check(launch(p, nullptr));
      check(cudaDeviceSynchronize());
    } else {
      reference_run(p, 0, reference_num_items(p));
    }
  }
  std::vector<uint16_t> got(keys.host.size());
  check(cudaMemcpy(got.data(), keys.device, keys.bytes(), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < got.size(); ++i) {
    const float a = BFloat16{got[i]}, b = BFloat16{keys.host[i]};
    if (got[i] != keys.host[i] && !(std::fabs(a - b) <= std::fabs(b) / 128 + 1e-5f)) return false;
  }
  return true;
}

}  // namespace

int main() {
  int cases = 0, failed = 0;
  for (const int rows : {0, 1, 9, 300}) {
    for (const bool decode : {true, false}) {
      ++cases;
      if (store(rows, decode)) continue;
      ++failed;
      std::printf("FAIL store %d rows, decode %d\n", rows, decode);
    }
  }
  for (const int bs : {1, 3, 40}) {
    for (int rows = 1; rows <= kMaxIndexRows; ++rows) {
      for (const int heads : {8, 64}) {
        for (const int page_size : {32, 64}) {
          for (const int longest : {1, 33, 700}) {
            ++cases;
            if (logits(bs, rows, heads, page_size, longest)) continue;
            ++failed;
            std::printf("FAIL logits bs %d rows %d heads %d page %d longest %d\n", bs, rows, heads, page_size, longest);
          }
        }
      }
    }
  }
  std::printf("%d cases, %d differ from the reference\n", cases, failed);
  return std::min(failed, 99);
}
