// Arrays that a program without torch keeps on the host and on the device, for the sanitize_*.cu programs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(100);
}

// An array on the host and on the device. Outputs differ until the op writes them: the host's hold 0x55, and the
// device's are uninitialized, so that initcheck reports reads of them.
template <typename T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(std::vector<T> values, bool upload = true) : host(std::move(values)) {
    check(cudaMalloc(&device, std::max<size_t>(bytes(), 1)));
    if (upload) check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  static Array output(size_t count) {
    Array array(std::vector<T>(count), false);
    std::memset(array.host.data(), 0x55, array.bytes());
    return array;
  }
  Array(Array&& other) : host(std::move(other.host)), device(other.device) { other.device = nullptr; }
  ~Array() { cudaFree(device); }

  size_t bytes() const { return host.size() * sizeof(T); }
  T* at(bool on_device) { return on_device ? device : host.data(); }
  bool equal() const {
    std::vector<T> got(host.size());
    check(cudaMemcpy(got.data(), device, bytes(), cudaMemcpyDeviceToHost));
    return got == host;
  }
};

template <typename T>
std::vector<T> filled(size_t count, const std::function<T()>& next) {
  std::vector<T> values(count);
  std::generate(values.begin(), values.end(), next);
  return values;
}
