// The index logits on the host, accumulated in double. The CPU key runs this.
#pragma once

#include <cstdint>
#include <string>

#include "index_logits/params.h"

namespace ddtree {

// Checks the lengths and the pages that they reach. Returns the first error, or an empty string.
std::string check_values(const IndexLogitsParams& params);

// Work items, which are independent of each other.
int64_t reference_num_items(const IndexLogitsParams& params);

// Runs the items [begin, end).
void reference_run(const IndexLogitsParams& params, int64_t begin, int64_t end);

}  // namespace ddtree
