#include "tree_verify/sm90/launch_mla_sm90.cuh"

namespace ddtree {
template cudaError_t launch_mla_sm90<__half, false>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
