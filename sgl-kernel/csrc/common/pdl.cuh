// Programmatic dependent launch (sm_90 and later): a kernel launched as another's dependent starts while that one still
// runs, and waits for it where it first needs its results.
#pragma once

namespace ddtree {

// In the first kernel: once every block has called it or exited, the dependent's blocks may take free multiprocessors.
__device__ __forceinline__ void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// In the dependent: waits until the first kernel has finished and its writes are visible. Returns at once in a kernel
// that was launched plainly.
__device__ __forceinline__ void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ddtree
