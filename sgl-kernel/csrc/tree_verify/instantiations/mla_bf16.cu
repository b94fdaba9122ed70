#include "tree_verify/kernel_launch.cuh"

namespace ddtree {
template cudaError_t launch_mla_typed<__nv_bfloat16, false>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
