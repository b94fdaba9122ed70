#include "../launch.cuh"

namespace ddtree {
template cudaError_t launch_gqa_typed<__nv_bfloat16, false, 64>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, false, 96>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, false, 128>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, false, 192>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, false, 256>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
