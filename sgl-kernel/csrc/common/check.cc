#include "common/check.h"

#include <algorithm>
#include <vector>

namespace ddtree {
namespace {

const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
}

std::string strides_string(const Tensor& tensor) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) out << (i ? ", " : "") << tensor.stride(i);
  out << "]";
  return out.str();
}

}  // namespace

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    default: return DType::kFloat32;
  }
}

const Arg& Arg::dtype(std::initializer_list<ScalarType> allowed) const {
  const ScalarType actual = tensor_.scalar_type();
  if (std::find(allowed.begin(), allowed.end(), actual) == allowed.end()) {
    std::string expected = "dtype ";
    for (ScalarType type : allowed)
      expected += (type == *allowed.begin() ? "" : " or ") + std::string(dtype_name(type));
    fail(name_, expected, dtype_name(actual));
  }
  return *this;
}

const Arg& Arg::on(const Arg& other) const {
  const bool same = tensor_.is_cpu() ? other.tensor_.is_cpu()
                                     : tensor_.is_cuda() == other.tensor_.is_cuda() &&
                                           tensor_.get_device_index() == other.tensor_.get_device_index();
  if (!same) fail(name_, "device " + device_name(other.tensor_) + " like " + other.name_, device_name(tensor_));
  return *this;
}

const Arg& Arg::dims(int64_t rank) const {
  check(tensor_.dim() == rank, name_, std::to_string(rank) + " dimensions", "shape " + shape_string(tensor_));
  return *this;
}

const Arg& Arg::shape(std::initializer_list<int64_t> expected) const {
  const std::vector<int64_t> want(expected);
  bool ok = tensor_.dim() == static_cast<int64_t>(want.size());
  for (size_t i = 0; ok && i < want.size(); ++i) ok = want[i] == kAny || tensor_.size(i) == want[i];
  if (!ok) {
    std::string text = "shape [";
    for (size_t i = 0; i < want.size(); ++i) {
      text += (i ? ", " : "") + (want[i] == kAny ? std::string("any") : std::to_string(want[i]));
    }
    fail(name_, text + "]", shape_string(tensor_));
  }
  return *this;
}

const Arg& Arg::contiguous() const {
  check(tensor_.is_contiguous(), name_, "a contiguous tensor",
        "shape " + shape_string(tensor_) + " with strides " + strides_string(tensor_));
  return *this;
}

const Arg& Arg::last_dim_contiguous() const {
  check(tensor_.dim() > 0 && (tensor_.size(tensor_.dim() - 1) <= 1 || tensor_.stride(tensor_.dim() - 1) == 1), name_,
        "a last dimension with stride 1", "strides " + strides_string(tensor_));
  return *this;
}

const Arg& Arg::aligned(int64_t bytes) const {
  const int64_t element = static_cast<int64_t>(tensor_.element_size());
  const auto address = reinterpret_cast<uintptr_t>(tensor_.const_data_ptr());
  check(address % bytes == 0, name_, "data aligned to " + std::to_string(bytes) + " bytes",
        "an address " + std::to_string(address % bytes) + " bytes past one");
  for (int64_t i = 0; i + 1 < tensor_.dim(); ++i) {
    check(tensor_.size(i) <= 1 || tensor_.stride(i) * element % bytes == 0, name_,
          "strides that are multiples of " + std::to_string(bytes) + " bytes", "strides " + strides_string(tensor_));
  }
  return *this;
}

}  // namespace ddtree
