#include "launch_gqa_sm90.cuh"

namespace ddtree {
template cudaError_t launch_gqa_sm90<__half, true, 64>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, true, 96>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, true, 128>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, true, 192>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_sm90<__half, true, 256>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
