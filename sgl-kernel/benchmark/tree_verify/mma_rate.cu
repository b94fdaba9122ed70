// Measures the rate of mma.sync m16n8k16 in bf16 with fp32 accumulation and operands in registers. This is the ceiling
// for kernels without architecture-specific matrix instructions. Prints one number, TFLOP/s (best of 10 launches).
// Build: nvcc -O3 -std=c++17 -arch=native -I ../../csrc -o mma_rate mma_rate.cu
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "common/mma_sm80.cuh"

constexpr int kThreads = 256, kChains = 8, kIterations = 4096;

__global__ void __launch_bounds__(kThreads) mma_loop(float* out, unsigned seed) {
  float d[kChains][4] = {};
  uint32_t a[4], b[2];
  unsigned x = seed + threadIdx.x * 2654435761u;
  auto random_pair = [&] {  // two bf16 in +-[1, 2), because the power drawn depends on the data
    x = x * 1664525u + 1013904223u;
    return (x & 0x807f807fu) | 0x3f803f80u;
  };
  for (auto& v : a) v = random_pair();
  for (auto& v : b) v = random_pair();
  for (int i = 0; i < kIterations; ++i) {
#pragma unroll
    for (int c = 0; c < kChains; ++c) ddtree::mma_m16n8k16<__nv_bfloat16>(d[c], a, b[0], b[1]);
  }
  float sum = 0;
  for (auto& chain : d)
    for (float v : chain) sum += v;
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

int main() {
  cudaDeviceProp prop;
  if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) return 1;
  const int blocks = prop.multiProcessorCount * 2;
  float* out;
  if (cudaMalloc(&out, blocks * kThreads * sizeof(float)) != cudaSuccess) return 1;
  cudaEvent_t start, stop;
  cudaEventCreate(&start), cudaEventCreate(&stop);
  float best = 1e30f;
  for (int i = 0; i < 12; ++i) {
    cudaEventRecord(start);
    mma_loop<<<blocks, kThreads>>>(out, 1234u + i);
    cudaEventRecord(stop);
    if (cudaEventSynchronize(stop) != cudaSuccess) return 1;
    float ms;
    cudaEventElapsedTime(&ms, start, stop);
    if (i >= 2) best = std::min(best, ms);
  }
  const double flops = double(blocks) * (kThreads / 32) * kIterations * kChains * (2.0 * 16 * 8 * 16);
  std::printf("%.1f\n", flops / best / 1e9);
}
