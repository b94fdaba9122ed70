#include "tree_verify/kernel_launch.cuh"

namespace ddtree {
template cudaError_t launch_mla_typed<__half, true>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
