// Programmatic dependent launch (sm_90 and later): a dependent kernel starts while its primary kernel still runs, and
// waits at the point where it first needs the primary's results.
#pragma once

namespace ddtree {

// For the primary kernel. Once every block has called it or exited, the dependent's blocks may take free
// multiprocessors.
__device__ __forceinline__ void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// For the dependent kernel. Waits until the primary has finished and its writes are visible. Returns immediately in a
// kernel that was launched without a primary.
__device__ __forceinline__ void wait_for_primary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ddtree
