// The indexer's ops on the host, computed in double. The CPU keys run these.
#pragma once

#include <cstdint>
#include <string>

#include "indexer/params.h"

namespace ddtree {

// Check the values that decide which memory is touched. Return the first error, or an empty string.
std::string check_values(const IndexLogitsParams& params);
std::string check_values(const StoreIndexKeysParams& params);

// Work items, which are independent of each other.
int64_t reference_num_items(const IndexLogitsParams& params);
int64_t reference_num_items(const StoreIndexKeysParams& params);

// Run the items [begin, end).
void reference_run(const IndexLogitsParams& params, int64_t begin, int64_t end);
void reference_run(const StoreIndexKeysParams& params, int64_t begin, int64_t end);

}  // namespace ddtree
