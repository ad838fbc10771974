// CUDA's own names, for the thread that the emulator runs: indexes, barriers, warps, atomics and intrinsics.
#pragma once

#include "emulator.h"

namespace headrace {

inline Thread& lane(int number) {
  return machine->threads[static_cast<size_t>(machine->current / kWarp * kWarp + (number & (kWarp - 1)))];
}

inline bool has_lane(int number) {
  return machine->current / kWarp * kWarp + number < static_cast<int>(machine->threads.size());
}

template <class T>
T exchange(unsigned mask, T value, int source, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a warp exchanges values of 8 bytes at most");
  Thread& self = machine->threads[machine->current];
  std::memcpy(&self.slot, &value, sizeof(T));
  wait(State::kAtWarpBarrier, mask, line);
  T result = value;
  if (has_lane(source)) std::memcpy(&result, &lane(source).slot, sizeof(T));
  wait(State::kAtWarpBarrier, mask, line);
  return result;
}

inline int lane_number() { return machine->current % kWarp; }

// The lane that a shuffle within groups of `width` reads.
inline int within(int source, int width) { return lane_number() / width * width + (source & (width - 1)); }

inline unsigned ballot(unsigned mask, bool holds, int line) {
  Thread& self = machine->threads[machine->current];
  self.slot = holds ? 1 : 0;
  wait(State::kAtWarpBarrier, mask, line);
  unsigned votes = 0;
  for (int i = 0; i < kWarp; i++)
    if ((mask >> i & 1) && has_lane(i) && lane(i).state != State::kDone && lane(i).slot != 0) votes |= 1u << i;
  wait(State::kAtWarpBarrier, mask, line);
  return votes;
}

}  // namespace headrace

#define threadIdx headrace::thread_index
#define blockIdx headrace::block_index
#define blockDim headrace::block_size
#define gridDim headrace::grid_size
#define warpSize 32

inline void __syncthreads(int line = __builtin_LINE()) {
  headrace::wait(headrace::State::kAtBlockBarrier, 0, line);
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  headrace::wait(headrace::State::kAtWarpBarrier, mask, line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  return headrace::exchange(mask, value, headrace::within(source, width), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
  const int own = headrace::lane_number(), source = own ^ bits;
  return headrace::exchange(mask, value, source / width <= own / width ? source : own, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
  const int own = headrace::lane_number(), source = own + static_cast<int>(by);
  return headrace::exchange(mask, value, source / width == own / width ? source : own, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
  const int own = headrace::lane_number(), source = own - static_cast<int>(by);
  return headrace::exchange(mask, value, source >= own / width * width ? source : own, line);
}
inline unsigned __ballot_sync(unsigned mask, int holds, int line = __builtin_LINE()) {
  return headrace::ballot(mask, holds != 0, line);
}
inline int __any_sync(unsigned mask, int holds, int line = __builtin_LINE()) {
  return headrace::ballot(mask, holds != 0, line) != 0;
}
inline int __all_sync(unsigned mask, int holds, int line = __builtin_LINE()) {
  return headrace::ballot(mask, holds == 0, line) == 0;
}

template <class T, class V>
T atomicAdd(T* at, V value) {
  return std::exchange(*at, static_cast<T>(*at + static_cast<T>(value)));
}
template <class T, class V>
T atomicMax(T* at, V value) {
  return std::exchange(*at, std::max(*at, static_cast<T>(value)));
}
template <class T, class V>
T atomicMin(T* at, V value) {
  return std::exchange(*at, std::min(*at, static_cast<T>(value)));
}
template <class T, class V>
T atomicExch(T* at, V value) {
  return std::exchange(*at, static_cast<T>(value));
}
template <class T, class C, class V>
T atomicCAS(T* at, C expected, V value) {
  return std::exchange(*at, *at == static_cast<T>(expected) ? static_cast<T>(value) : *at);
}

template <class T>
T __ldg(const T* at) {
  return *at;
}

template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }
inline float normcdff(float x) { return 0.5f * std::erfc(-x * 0.70710678f); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }

namespace headrace {
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace headrace
inline int __float_as_int(float x) { return headrace::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return headrace::bits<unsigned>(x); }
inline float __int_as_float(int x) { return headrace::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return headrace::bits<float>(x); }
