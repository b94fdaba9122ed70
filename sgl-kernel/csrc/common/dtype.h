// Element types of the tensors that ops take. Each op says which of them it allows.
#pragma once

#include <cstdint>

namespace ddtree {

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat8E4M3 = 3 };

}  // namespace ddtree
