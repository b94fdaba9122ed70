// Host-side argument checks. Every error names the op's argument, what was expected and what was given.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/dtype.h"

namespace ddtree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Reports a wrong argument as "<argument>: expected <expected>, got <actual>". Every op uses this form.
template <typename Expected, typename Actual>
[[noreturn]] void fail(const std::string& argument, const Expected& expected, const Actual& actual) {
  std::ostringstream message;
  message << argument << ": expected " << expected << ", got " << actual;
  throw std::invalid_argument(message.str());
}

template <typename Expected, typename Actual>
void check(bool ok, const std::string& argument, const Expected& expected, const Actual& actual) {
  if (!ok) fail(argument, expected, actual);
}

inline std::string shape_string(const Tensor& tensor) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) out << (i ? ", " : "") << tensor.size(i);
  out << "]";
  return out.str();
}

// Of a tensor that has one of DType's types.
DType dtype_of(const Tensor& tensor);

// A named tensor argument. Checks can be chained:
//   Arg("k_cache", k_cache).on(q_arg).dtype({ScalarType::BFloat16}).shape({Arg::kAny, h_kv, d}).contiguous();
class Arg {
 public:
  Arg(const char* name, const Tensor& tensor) : name_(name), tensor_(tensor) {}

  const Arg& dtype(std::initializer_list<ScalarType> allowed) const;
  // On the same device as `other`, the op's first tensor.
  const Arg& on(const Arg& other) const;
  const Arg& dims(int64_t rank) const;
  // `expected` holds kAny for a dimension of any size.
  const Arg& shape(std::initializer_list<int64_t> expected) const;
  const Arg& contiguous() const;
  const Arg& last_dim_contiguous() const;
  // data_ptr() and every outer stride are multiples of `bytes`, as vector loads require.
  const Arg& aligned(int64_t bytes) const;

  static constexpr int64_t kAny = -1;

 private:
  const char* name_;
  const Tensor& tensor_;  // owned by the caller: an Arg must not outlive the call that it checks
};

}  // namespace ddtree
