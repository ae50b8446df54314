// The subset of the Metal language that the emulator runs, for a host C++17 compiler.
//
// Types: bool, int, uint, ushort, ulong, float, the intN_t / uintN_t of MLX's signatures, uint3; half, float16_t and
// bfloat16_t may be loaded, stored and converted to float, not computed with.
// Functions: threadgroup_barrier, simd_shuffle, simd_shuffle_xor, simd_any, simd_prefix_exclusive_sum (integers), min,
// max, as_type. Left out on purpose: simd_sum and float prefix sums, whose order Metal leaves open.
// Stricter than Metal: every lane of a simdgroup must reach a simd function, and every thread of a threadgroup the
// same barrier; threadgroup arrays are bounds-checked and checked for races and for reads before a write.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "scheduler.h"
#include "threadgroup_memory.h"

using uint = unsigned int;
using ushort = unsigned short;
using ulong = std::uint64_t;

struct uint3 {
  uint x, y, z;
};

template <class To, class From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

struct float16_t {
  std::uint16_t bits;
  explicit operator float() const {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0x1f) return as_type<float>(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float
      return as_type<float>(as_type<std::uint32_t>(float(fraction) * 0x1p-24f) | sign);
    }
    return as_type<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  }
};
using half = float16_t;

struct bfloat16_t {
  std::uint16_t bits;
  explicit operator float() const { return as_type<float>(std::uint32_t(bits) << 16); }
};

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::barrier(flags == mem_flags::mem_threadgroup, line);
}

// Every simd function is one rendezvous of the simdgroup, after which each lane reads what the others brought.
template <class T>
inline T simd_shuffle(T value, ushort source, int line = __builtin_LINE()) {
  const auto lanes = emulator::exchange(value, "simd_shuffle", line);
  if (source >= emulator::SIMD_WIDTH) emulator::fail("simd_shuffle from a lane outside the simdgroup", line);
  return lanes[source];
}

template <class T>
inline T simd_shuffle_xor(T value, ushort mask, int line = __builtin_LINE()) {
  const auto lanes = emulator::exchange(value, "simd_shuffle_xor", line);
  if (mask >= emulator::SIMD_WIDTH) emulator::fail("simd_shuffle_xor with a lane outside the simdgroup", line);
  return lanes[emulator::lane() ^ mask];
}

inline bool simd_any(bool value, int line = __builtin_LINE()) {
  const auto lanes = emulator::exchange(value, "simd_any", line);
  bool any = false;
  for (uint other = 0; other < emulator::SIMD_WIDTH; ++other) any = any || lanes[other];
  return any;
}

template <class T>
inline T simd_prefix_exclusive_sum(T value, int line = __builtin_LINE()) {
  static_assert(std::is_integral<T>::value, "Metal leaves the order of a floating-point prefix sum open");
  const auto lanes = emulator::exchange(value, "simd_prefix_exclusive_sum", line);
  T sum = 0;
  for (uint other = 0; other < emulator::lane(); ++other) sum += lanes[other];
  return sum;
}

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
