#include "tree_verify/sm90/launch_mla_sm90.cuh"

namespace ddtree {
template cudaError_t launch_mla_sm90<__nv_bfloat16, true>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
