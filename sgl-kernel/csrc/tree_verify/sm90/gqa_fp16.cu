#include "launch_gqa_sm90.cuh"

namespace ddtree {
template cudaError_t launch_gqa_sm90<__half, false, 64>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, false, 96>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, false, 128>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, false, 192>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, false, 256>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
