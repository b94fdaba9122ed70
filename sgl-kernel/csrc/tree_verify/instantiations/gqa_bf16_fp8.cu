#include "../launch.cuh"

namespace ddtree {
template cudaError_t launch_gqa_typed<__nv_bfloat16, true, 64>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, true, 96>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, true, 128>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, true, 192>(const TreeVerifyParams&, const Launch&);
template cudaError_t launch_gqa_typed<__nv_bfloat16, true, 256>(const TreeVerifyParams&, const Launch&);
}  // namespace ddtree
