#include "../launch.cuh"

namespace ddtree {
template cudaError_t launch_mla_typed<__half, false>(const TreeVerifyParams&, cudaStream_t);
}  // namespace ddtree
