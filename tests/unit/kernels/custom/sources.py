"""Kernels that the tests compile."""

from __future__ import annotations

ELEMENTS = """__global__ void own(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  %s
}
"""

SILU_AND_MUL = """#include <cuda_bf16.h>
// Rows of 2 * inner become rows of inner; a block for each.
__global__ void __launch_bounds__(128) silu_and_mul(
    const __nv_bfloat16* __restrict__ gate_up, __nv_bfloat16* __restrict__ out, int inner) {
  const __nv_bfloat16* row = gate_up + size_t(blockIdx.x) * 2 * inner;
  for (int i = threadIdx.x; i < inner; i += blockDim.x) {
    const float gate = __bfloat162float(row[i]);
    out[size_t(blockIdx.x) * inner + i] =
        __float2bfloat16(gate / (1.0f + __expf(-gate)) * __bfloat162float(row[inner + i]));
  }
}
"""
SILU_AND_MUL_SIGNATURE = "const bfloat16 gate_up[*rows, 2*inner], bfloat16 out[*rows, inner], int inner"

RMS_NORM = """extern __shared__ float parts[];
template <class T> __device__ T warp_sum(T value) {
  for (int k = 16; k > 0; k /= 2) value += __shfl_xor_sync(0xffffffffu, value, k);
  return value;
}
__global__ void rms_norm(const float* x, const float* weight, float* out, int width, float eps) {
  const float* row = x + size_t(blockIdx.x) * width;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) sum += row[i] * row[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < blockDim.x / 32; i++) total += parts[i];
  const float scale = rsqrtf(total / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    out[size_t(blockIdx.x) * width + i] = row[i] * scale * weight[i];
}
"""
RMS_NORM_SIGNATURE = (
    "const float x[*rows, width], const float weight[width], float out[*rows, width], int width, float eps"
)

SPILLS = """__global__ void __launch_bounds__(1024, 2) own(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v[64];
#pragma unroll
  for (int k = 0; k < 64; k++) v[k] = x[(i + k * 7) % n];
#pragma unroll 1
  for (int j = 0; j < n; j++) {
#pragma unroll
    for (int k = 0; k < 64; k++) v[k] = v[k] * v[(k + 1) % 64] + v[(k * 5 + 3) % 64];
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 64; k++) sum += v[k];
  if (i < n) y[i] = sum;
}
"""
"""32 registers for each thread, and 64 values that all live at once."""
