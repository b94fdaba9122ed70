// What a *_cuda.cc file needs around a launch: the tensor's device made current, torch's current stream, and an error
// check. Not for .cu files: those include no torch header.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

// torch declares it only where it was itself built with CUDA (USE_CUDA); the symbol is in libtorch_cuda.so.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace ddtree {

// For the duration of one op call: `tensor`'s device is current, stream() is torch's current stream there.
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

  // Raises if the launch just made was refused. Faults inside the kernel show at the next synchronization.
  static void check(const char* op, cudaError_t error = cudaGetLastError()) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(op) + ": " + cudaGetErrorString(error));
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace ddtree
