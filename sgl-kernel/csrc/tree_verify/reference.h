// CPU reference of the tree-verify attention ops, GQA and MLA alike: what the CPU key runs and what the CUDA kernels
// are compared with. No torch.
#pragma once

#include <cstdint>
#include <string>

#include "tree_verify/params.h"

namespace ddtree {

// The work falls into independent items; any thread may run any range of them.
int64_t reference_num_items(const TreeVerifyParams& params);
void reference_run(const TreeVerifyParams& params, int64_t begin, int64_t end);

// Checks the values behind the host pointers of `params` that shapes cannot show: indptr order, lengths, slots inside
// the pool, ancestor bits inside the row's request. Returns an empty string, or what is wrong in the words
// "<argument>: expected <expected>, got <actual>".
// num_kv_indices: length of the kv_indices tensor.
std::string check_values(const TreeVerifyParams& params, int64_t num_kv_indices);

}  // namespace ddtree
