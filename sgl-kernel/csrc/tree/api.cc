#include "tree/api.h"

#include "common/check.h"
#include "tree/reference.h"

namespace ddtree {
namespace {

constexpr ScalarType kLong = ScalarType::Long, kInt = ScalarType::Int, kFloat = ScalarType::Float;

void check_range(const char* name, const char* what, int64_t value, int64_t low, int64_t high) {
  check(value >= low && value <= high, name,
        std::string(what) + " of " + std::to_string(low) + " to " + std::to_string(high), value);
}

void check_together(const char* name, const OptionalTensor& given, const char* other_name,
                    const OptionalTensor& other) {
  check(given.has_value() == other.has_value(), name,
        std::string(other ? "a tensor" : "None") + ", as " + other_name + " is " + (other ? "given" : "None"),
        given ? "a tensor" : "None");
}

}  // namespace

BuildParams build_params(const Tensor& candidates, const Tensor& log_probs, const OptionalTensor& log_sum,
                         const OptionalTensor& beam, const Tensor& bonus, bool keep_top1_path, const Tensor& tokens,
                         const Tensor& parents, const Tensor& depths, const Tensor& ancestors,
                         const Tensor& first_child, const Tensor& next_sibling, const Tensor& sizes,
                         const OptionalTensor& scores) {
  const Arg first("candidates", candidates);
  first.dtype({kLong}).dims(3).contiguous();
  const int64_t bs = candidates.size(0), D = candidates.size(1), K = candidates.size(2);
  check_range("candidates", "[bs, D, K] with D", D, 1, kMaxDepth);
  check_range("candidates", "[bs, D, K] with K", K, 1, kMaxCandidates);
  const Arg given("log_probs", log_probs);
  given.on(first).dtype({kFloat});
  int64_t W = 0;
  if (log_probs.dim() == 4) {
    W = log_probs.size(2);
    check(!log_sum, "log_sum", "None with log_probs of [bs, D, W, K], which are log-probabilities", "a tensor");
    check_range("log_probs", "[bs, D, W, K] with W", W, 1, kMaxPaths);
    check(beam || W == K, "log_probs", "W = K = " + std::to_string(K) + " without a beam", W);
    given.shape({bs, D, W, K}).contiguous();
  } else {
    check(!beam, "beam", "None with log_probs of [bs, D, K]", "a tensor");
    given.shape({bs, D, K}).contiguous();
  }
  if (log_sum) Arg("log_sum", *log_sum).on(first).dtype({kFloat}).shape({bs, D}).contiguous();
  if (beam) Arg("beam", *beam).on(first).dtype({kInt}).shape({bs, D, W}).contiguous();
  Arg("bonus", bonus).on(first).dtype({kLong}).shape({bs}).contiguous();

  Arg("tokens", tokens).on(first).dtype({kLong}).shape({bs, Arg::kAny}).contiguous();
  const int64_t N = tokens.size(1);
  check_range("tokens", "[bs, N] with N", N, 1, kMaxNodes);
  Arg("parents", parents).on(first).dtype({kInt}).shape({bs, N}).contiguous();
  Arg("depths", depths).on(first).dtype({kInt}).shape({bs, N}).contiguous();
  Arg("ancestors", ancestors).on(first).dtype({kLong}).shape({bs, N, Arg::kAny}).contiguous();
  const int64_t words = ancestor_words(static_cast<int>(N));
  check(ancestors.size(2) >= words, "ancestors", "at least " + std::to_string(words) + " words per node",
        "shape " + shape_string(ancestors));
  Arg("first_child", first_child).on(first).dtype({kInt}).shape({bs, N}).contiguous();
  Arg("next_sibling", next_sibling).on(first).dtype({kInt}).shape({bs, N}).contiguous();
  Arg("sizes", sizes).on(first).dtype({kInt}).shape({bs}).contiguous();
  if (scores) Arg("scores", *scores).on(first).dtype({kFloat}).shape({bs, N}).contiguous();

  BuildParams params{};
  params.candidates = candidates.const_data_ptr<int64_t>();
  params.log_probs = log_probs.const_data_ptr<float>();
  params.log_sum = log_sum ? log_sum->const_data_ptr<float>() : nullptr;
  params.beam = beam ? beam->const_data_ptr<int32_t>() : nullptr;
  params.bonus = bonus.const_data_ptr<int64_t>();
  params.tokens = tokens.mutable_data_ptr<int64_t>();
  params.parents = parents.mutable_data_ptr<int32_t>();
  params.depths = depths.mutable_data_ptr<int32_t>();
  params.ancestors = reinterpret_cast<uint64_t*>(ancestors.mutable_data_ptr<int64_t>());
  params.first_child = first_child.mutable_data_ptr<int32_t>();
  params.next_sibling = next_sibling.mutable_data_ptr<int32_t>();
  params.sizes = sizes.mutable_data_ptr<int32_t>();
  params.scores = scores ? scores->mutable_data_ptr<float>() : nullptr;
  params.bs = static_cast<int32_t>(bs);
  params.max_depth = static_cast<int32_t>(D);
  params.num_paths = static_cast<int32_t>(W);
  params.num_candidates = static_cast<int32_t>(K);
  params.num_nodes = static_cast<int32_t>(N);
  params.words = static_cast<int32_t>(ancestors.size(2));
  params.keep_top1_path = keep_top1_path;
  return params;
}

AcceptParams accept_params(const Tensor& tokens, const Tensor& parents, const Tensor& target, const Tensor& path,
                           const Tensor& output, const Tensor& lengths, const Tensor& bonus) {
  const Arg first("tokens", tokens);
  first.dtype({kLong}).dims(2).contiguous();
  const int64_t bs = tokens.size(0), N = tokens.size(1);
  check_range("tokens", "[bs, N] with N", N, 1, kMaxNodes);
  Arg("parents", parents).on(first).dtype({kInt}).shape({bs, N}).contiguous();
  Arg("target", target).on(first).dtype({kLong}).shape({bs, N}).contiguous();
  Arg("path", path).on(first).dtype({kLong}).shape({bs, Arg::kAny}).contiguous();
  const int64_t F = path.size(1);
  check_range("path", "[bs, F] with F", F, 1, kMaxNodes);
  Arg("output", output).on(first).dtype({kLong}).shape({bs, F}).contiguous();
  Arg("lengths", lengths).on(first).dtype({kInt}).shape({bs}).contiguous();
  Arg("bonus", bonus).on(first).dtype({kLong}).shape({bs}).contiguous();

  AcceptParams params{};
  params.tokens = tokens.const_data_ptr<int64_t>();
  params.parents = parents.const_data_ptr<int32_t>();
  params.target = target.const_data_ptr<int64_t>();
  params.path = path.mutable_data_ptr<int64_t>();
  params.output = output.mutable_data_ptr<int64_t>();
  params.lengths = lengths.mutable_data_ptr<int32_t>();
  params.bonus = bonus.mutable_data_ptr<int64_t>();
  params.bs = static_cast<int32_t>(bs);
  params.num_nodes = static_cast<int32_t>(N);
  params.block_size = static_cast<int32_t>(F);
  return params;
}

CommitParams commit_params(const Tensor& path, const Tensor& lengths, const Tensor& slots, const Tensor& buffers,
                           int64_t max_row_bytes, const OptionalTensor& hidden, const OptionalTensor& hidden_out) {
  const Arg first("path", path);
  first.dtype({kLong}).dims(2).contiguous();
  const int64_t bs = path.size(0), F = path.size(1);
  check_range("path", "[bs, F] with F", F, 1, kMaxNodes);
  Arg("lengths", lengths).on(first).dtype({kInt}).shape({bs}).contiguous();
  Arg("slots", slots).on(first).dtype({kLong}).shape({bs, Arg::kAny}).contiguous();
  const int64_t N = slots.size(1);
  check_range("slots", "[bs, N] with N", N, 1, kMaxNodes);
  Arg("buffers", buffers).on(first).dtype({kLong}).shape({Arg::kAny, 3}).contiguous();
  check(max_row_bytes >= 0, "max_row_bytes", "0 or more", max_row_bytes);
  check_together("hidden_out", hidden_out, "hidden", hidden);
  if (hidden) {
    Arg("hidden", *hidden).on(first).shape({bs * N, Arg::kAny}).contiguous();
    const int64_t width = hidden->size(1);
    Arg("hidden_out", *hidden_out).on(first).dtype({hidden->scalar_type()}).shape({bs, F, width}).contiguous();
  }

  CommitParams params{};
  params.path = path.const_data_ptr<int64_t>();
  params.lengths = lengths.const_data_ptr<int32_t>();
  params.slots = slots.const_data_ptr<int64_t>();
  static_assert(sizeof(KVBuffer) == 3 * sizeof(int64_t), "a row of buffers");
  params.buffers = reinterpret_cast<const KVBuffer*>(buffers.const_data_ptr<int64_t>());
  params.num_buffers = static_cast<int32_t>(buffers.size(0));
  params.max_row_bytes = max_row_bytes;
  if (hidden) {
    params.hidden = static_cast<const char*>(hidden->const_data_ptr());
    params.hidden_out = static_cast<char*>(hidden_out->mutable_data_ptr());
    params.hidden_bytes = hidden->size(1) * static_cast<int64_t>(hidden->element_size());
  }
  params.bs = static_cast<int32_t>(bs);
  params.num_nodes = static_cast<int32_t>(N);
  params.block_size = static_cast<int32_t>(F);
  return params;
}

void run_cpu(const BuildParams& params, const Tensor&) { reference_build(params); }
void run_cpu(const AcceptParams& params, const Tensor&) { reference_accept(params); }
void run_cpu(const CommitParams& params, const Tensor&) { reference_commit(params); }

}  // namespace ddtree
