// The ops in plain C++: the recurrence itself, node by node from its parent, in double.
#pragma once

#include <cstdint>

#include "tree_recurrent/params.h"

namespace ddtree {

// Each op is a number of independent items; run items [begin, end).
int64_t num_items(const RecurrentVerifyParams& params);
int64_t num_items(const RecurrentCommitParams& params);
int64_t num_items(const ConvVerifyParams& params);
int64_t num_items(const ConvCommitParams& params);
void run_reference(const RecurrentVerifyParams& params, int64_t begin, int64_t end);
void run_reference(const RecurrentCommitParams& params, int64_t begin, int64_t end);
void run_reference(const ConvVerifyParams& params, int64_t begin, int64_t end);
void run_reference(const ConvCommitParams& params, int64_t begin, int64_t end);

}  // namespace ddtree
