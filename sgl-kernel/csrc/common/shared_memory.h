// How much shared memory a block may have.
#pragma once

namespace ddtree {

constexpr int kMaxSharedMemory = 101376;      // per block on sm_120 (99 KiB)
constexpr int kMaxSharedMemorySm90 = 232448;  // per block on sm_90 (227 KiB)

}  // namespace ddtree
