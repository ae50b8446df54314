// The program around a translated kernel: reads a request from standard input, answers on standard output.
//
// Request: grid (3 x u32), threadgroup size (3 x u32), inputs, outputs, runs (u32 each); byte count (u64) of every
// buffer; the inputs' bytes; then schedule, seed, poison (u32 each) of every run. Answer: for every run, the outputs'
// bytes. Exit status 3 and a line on standard error: the kernel did something that it must not do.
#pragma once
#include "metal_language.h"

namespace emulator {

constexpr std::size_t GUARD_BYTES = 4096;
constexpr unsigned char GUARD = 0xc5;

// A buffer between guard zones. Under the sanitizers it stands alone, so that they see its exact bounds.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
#ifdef EMULATOR_SANITIZED
    memory_ = start_ = static_cast<unsigned char*>(std::malloc(bytes));
#else
    memory_ = static_cast<unsigned char*>(std::malloc(bytes + 2 * GUARD_BYTES));
    start_ = memory_ + GUARD_BYTES;
    std::memset(memory_, GUARD, bytes + 2 * GUARD_BYTES);
#endif
  }
  unsigned char* start() const { return start_; }
  std::size_t bytes() const { return bytes_; }
  void check_guards() const {
#ifndef EMULATOR_SANITIZED
    for (std::size_t i = 0; i < GUARD_BYTES; ++i) {
      if (memory_[i] != GUARD || start_[bytes_ + i] != GUARD) fail("write outside a device buffer", 0);
    }
#endif
  }

 private:
  std::size_t bytes_;
  unsigned char* memory_;
  unsigned char* start_;
};

inline std::vector<Buffer> buffers;

template <class T>
inline T* buffer(std::size_t index) {
  return reinterpret_cast<T*>(buffers[index].start());
}

inline uint3 threadgroup_position_in_grid() {
  return {threadgroup_position.x, threadgroup_position.y, threadgroup_position.z};
}
inline uint thread_index_in_threadgroup() { return running->index; }
inline uint thread_index_in_simdgroup() { return lane(); }
inline uint simdgroup_index_in_threadgroup() { return simdgroup(); }
inline uint simdgroups_per_threadgroup() { return uint(simdgroups.size()); }
inline uint threads_per_simdgroup() { return SIMD_WIDTH; }

inline void read_exactly(void* target, std::size_t bytes) {
  if (bytes && std::fread(target, 1, bytes, stdin) != bytes) {
    std::fprintf(stderr, "emulator: the request ends early\n");
    _exit(4);
  }
}

inline uint32_t read_u32() {
  uint32_t value;
  read_exactly(&value, sizeof value);
  return value;
}

inline void run_grid() {
  std::vector<uint32_t> order(threadgroup_count.count());
  put_in_order(order);
  for (uint32_t group : order) {
    threadgroup_position = {group % threadgroup_count.x, group / threadgroup_count.x % threadgroup_count.y,
                            group / threadgroup_count.x / threadgroup_count.y};
    run_threadgroup();
  }
}

inline int answer_request(void (*thread)()) {
  kernel_thread = thread;
  const Extent grid = {read_u32(), read_u32(), read_u32()};
  threadgroup_size = {read_u32(), read_u32(), read_u32()};
  threadgroup_count = {grid.x / threadgroup_size.x, grid.y / threadgroup_size.y, grid.z / threadgroup_size.z};
  const uint32_t inputs = read_u32(), outputs = read_u32(), runs = read_u32();
  for (uint32_t i = 0; i < inputs + outputs; ++i) {
    std::uint64_t bytes;
    read_exactly(&bytes, sizeof bytes);
    buffers.emplace_back(bytes);
  }
  for (uint32_t i = 0; i < inputs; ++i) read_exactly(buffers[i].start(), buffers[i].bytes());
  create_threads();
  for (uint32_t run = 0; run < runs; ++run) {
    schedule = Schedule(read_u32());
    random_state = read_u32() + 1;
    const int poison = int(read_u32());
    for (uint32_t i = inputs; i < inputs + outputs; ++i) std::memset(buffers[i].start(), poison, buffers[i].bytes());
    run_grid();
    for (const Buffer& each : buffers) each.check_guards();
    for (uint32_t i = inputs; i < inputs + outputs; ++i) {
      std::fwrite(buffers[i].start(), 1, buffers[i].bytes(), stdout);
    }
  }
  std::fflush(stdout);
  _exit(0);
}

}  // namespace emulator
