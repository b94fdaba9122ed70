// Support for launches in *_cuda.cc files: makes the tensor's device current, gives torch's current stream, and checks
// errors. Not for .cu files, which include no torch header.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

// torch declares this only if it was itself built with CUDA (USE_CUDA). The symbol is in libtorch_cuda.so.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace ddtree {

// For the duration of one op call, `tensor`'s device is current and stream() is torch's current stream on it.
class CudaCall {
 public:
  explicit CudaCall(const torch::stable::Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
      throw std::runtime_error("torch has no current CUDA stream: is this torch built with CUDA?");
    }
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  // Throws if the last launch was refused. Faults inside the kernel surface at the next synchronization.
  static void check(const char* op, cudaError_t error = cudaGetLastError()) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace ddtree
