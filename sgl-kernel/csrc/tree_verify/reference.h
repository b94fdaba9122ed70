// CPU reference of the tree-verify attention ops, GQA and MLA. The CPU keys run it, and the CUDA kernels are compared
// with it. No torch here.
#pragma once

#include <cstdint>
#include <string>

#include "tree_verify/params.h"

namespace ddtree {

// The work consists of independent items. Any thread may run any range of them.
int64_t reference_num_items(const TreeVerifyParams& params);
void reference_run(const TreeVerifyParams& params, int64_t begin, int64_t end);

// Checks values behind the host pointers of `params` that shapes cannot show: indptr order, lengths, slots inside the
// pool, ancestor bits inside the node's request. Returns an empty string, or an error as "<argument>: expected
// <expected>, got <actual>". num_kv_indices is the length of the kv_indices tensor.
std::string check_values(const TreeVerifyParams& params, int64_t num_kv_indices);

}  // namespace ddtree
