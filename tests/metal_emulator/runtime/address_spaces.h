// The same subset for clang's C++ for OpenCL, which keeps address spaces apart as Metal does. Nothing is run: half and
// bfloat16 are stand-ins of the right size, functions have no bodies that matter.
#pragma once
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define INFINITY __builtin_inff()

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef ushort float16_t;
typedef ushort bfloat16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_prefix_exclusive_sum(T);
bool simd_any(bool);
template <class T> T min(T, T);
template <class T> T max(T, T);
template <class To, class From> To as_type(From);
