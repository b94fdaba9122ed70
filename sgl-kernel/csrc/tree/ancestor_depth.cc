#include "tree/ancestor_depth.h"

#include "common/check.h"

namespace ddtree {

void check_ancestor_depth(const Tensor& ancestors, const Tensor& depth) {
  Arg words("ancestors", ancestors);
  words.dtype({ScalarType::Long}).dims(2).contiguous();
  Arg("depth", depth).on(words).dtype({ScalarType::Int}).shape({ancestors.size(0)}).contiguous();
}

void ancestor_depth_cpu(Tensor ancestors, Tensor depth) {
  check_ancestor_depth(ancestors, depth);
  const auto* words = ancestors.const_data_ptr<int64_t>();
  auto* out = depth.mutable_data_ptr<int32_t>();
  const int64_t num_words = ancestors.size(1);
  for (int64_t row = 0; row < ancestors.size(0); ++row) {
    int32_t count = 0;
    for (int64_t w = 0; w < num_words; ++w) {
      count += __builtin_popcountll(static_cast<uint64_t>(words[row * num_words + w]));
    }
    out[row] = count - 1;  // a row is not its own ancestor
  }
}

}  // namespace ddtree
