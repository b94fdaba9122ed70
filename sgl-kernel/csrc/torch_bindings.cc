// The ops of torch.ops.sgl_kernel that this package adds. One entry an op, OP(name, schema): it registers
// sgl_kernel::ddtree_<name>, implemented by ddtree::<name>_cpu and ddtree::<name>_cuda. Compiled twice: into
// _ddtree_cpu.so (schemas and CPU keys) and, with DDTREE_CUDA_KEYS, into _ddtree_cuda.so (CUDA keys). The Meta keys
// are in python/sgl_kernel/ddtree.
//
// Ops write into tensors of the caller and allocate nothing, so that a captured graph holds no memory of theirs.
#include <torch/csrc/stable/library.h>

#include "tree/ancestor_depth.h"

#define DDTREE_OPS(OP) OP(ancestor_depth, "(Tensor ancestors, Tensor(a!) depth) -> ()")

#ifdef DDTREE_CUDA_KEYS

#define DDTREE_IMPL(name, schema) m.impl("ddtree_" #name, TORCH_BOX(&ddtree::name##_cuda));
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CUDA, m) { DDTREE_OPS(DDTREE_IMPL) }

#else

#define DDTREE_SCHEMA(name, schema) m.def("ddtree_" #name schema);
STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) { DDTREE_OPS(DDTREE_SCHEMA) }

#define DDTREE_IMPL(name, schema) m.impl("ddtree_" #name, TORCH_BOX(&ddtree::name##_cpu));
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) { DDTREE_OPS(DDTREE_IMPL) }

#endif
