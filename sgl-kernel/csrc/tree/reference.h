// The draft-tree ops on the host: what the CPU keys run, and what the kernels equal bit for bit.
#pragma once

#include "tree/params.h"

namespace ddtree {

void reference_build(const BuildParams& params);
void reference_accept(const AcceptParams& params);
void reference_commit(const CommitParams& params);

}  // namespace ddtree
