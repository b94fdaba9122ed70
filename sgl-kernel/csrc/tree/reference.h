// The draft-tree ops on the host. The CPU keys run these, and the kernels match them bit for bit.
#pragma once

#include "tree/params.h"

namespace ddtree {

void reference_build(const BuildParams& params);
void reference_accept(const AcceptParams& params);
void reference_commit(const CommitParams& params);

}  // namespace ddtree
