// Runs one threadgroup at a time: each thread as a fiber until it waits at a barrier or a simd function.
//
// A rendezvous is real: nobody passes a barrier before all threads stand at that very barrier, and nobody leaves a simd
// function before all 32 lanes have brought their values to that very call. Anything else is reported and ends the
// program.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <unistd.h>

#include "fibers.h"

namespace emulator {

using std::uint32_t;

constexpr uint32_t SIMD_WIDTH = 32;
constexpr std::size_t PAYLOAD_BYTES = 8;  // one scalar of a simd function

enum class Schedule : uint32_t { ascending = 0, descending = 1, shuffled = 2 };
enum class State { ready, at_simd_function, at_barrier, done };

struct Extent {
  uint32_t x, y, z;
  uint32_t count() const { return x * y * z; }
};

struct Thread {
  Fiber fiber;
  State state = State::done;
  const char* function = "";  // the simd function it waits at
  int line = 0;               // the kernel line it waits at
  uint32_t index = 0;
  unsigned char payload[PAYLOAD_BYTES] = {};
};

struct Simdgroup {
  unsigned char lanes[SIMD_WIDTH * PAYLOAD_BYTES] = {};  // what they brought to the last rendezvous
};

inline std::vector<Thread> threads;
inline std::vector<Simdgroup> simdgroups;
inline Thread* running = nullptr;
inline Extent threadgroup_size, threadgroup_count, threadgroup_position;
inline void (*kernel_thread)() = nullptr;
inline uint32_t epoch = 0;        // rises at every barrier that orders threadgroup memory, and never falls
inline uint32_t group_start = 0;  // the epoch in which the running threadgroup began
inline bool barrier_orders_memory = false;
inline Schedule schedule = Schedule::ascending;
inline std::uint64_t random_state = 1;

[[noreturn]] inline void fail(const char* message, int line) {
  std::fprintf(stderr, "kernel fault: %s (kernel line %d, thread %u, threadgroup %u,%u,%u)\n", message, line,
               running ? running->index : 0, threadgroup_position.x, threadgroup_position.y, threadgroup_position.z);
  std::fflush(stderr);
  _exit(3);
}

inline uint32_t lane() { return running->index % SIMD_WIDTH; }
inline uint32_t simdgroup() { return running->index / SIMD_WIDTH; }

inline void wait(State state, const char* function, int line) {
  running->state = state;
  running->function = function;
  running->line = line;
  suspend(running->fiber);
}

inline void barrier(bool orders_threadgroup_memory, int line) {
  barrier_orders_memory = orders_threadgroup_memory;
  wait(State::at_barrier, "threadgroup_barrier", line);
}

// What the lanes of a simdgroup brought to a simd function. They stay until all have come to their next rendezvous.
template <class T>
class Lanes {
 public:
  explicit Lanes(const unsigned char* bytes) : bytes_(bytes) {}
  T operator[](uint32_t lane) const {
    T value;
    std::memcpy(&value, bytes_ + lane * PAYLOAD_BYTES, sizeof(T));
    return value;
  }

 private:
  const unsigned char* bytes_;
};

template <class T>
inline Lanes<T> exchange(T value, const char* function, int line) {
  static_assert(sizeof(T) <= PAYLOAD_BYTES, "simd functions take scalars");
  std::memcpy(running->payload, &value, sizeof(T));
  wait(State::at_simd_function, function, line);
  return Lanes<T>(simdgroups[simdgroup()].lanes);
}

inline uint32_t random_below(uint32_t bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t(random_state % bound);
}

inline void put_in_order(std::vector<uint32_t>& order) {
  const uint32_t count = uint32_t(order.size());
  for (uint32_t i = 0; i < count; ++i) order[i] = schedule == Schedule::descending ? count - 1 - i : i;
  if (schedule == Schedule::shuffled) {
    for (uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  }
}

inline void thread_entry() {
  arrived();
  for (;;) {  // the fiber serves the same thread index in every threadgroup
    kernel_thread();
    running->state = State::done;
    suspend(running->fiber);
  }
}

// Lets the simdgroup go on if all of its lanes wait at one simd function. True if it did.
inline bool release_simdgroup(uint32_t group) {
  Thread* first = &threads[group * SIMD_WIDTH];
  Thread* waiting = nullptr;
  for (uint32_t i = 0; i < SIMD_WIDTH; ++i) {
    if (first[i].state == State::at_simd_function) waiting = &first[i];
  }
  if (!waiting) return false;
  for (uint32_t i = 0; i < SIMD_WIDTH; ++i) {
    running = &first[i];
    if (running->state != State::at_simd_function) {
      fail("a lane is missing from a simd function: it left or waits at a barrier", waiting->line);
    }
    if (running->line != waiting->line || std::strcmp(running->function, waiting->function) != 0) {
      fail("the lanes of a simdgroup wait at different simd functions", waiting->line);
    }
  }
  for (uint32_t i = 0; i < SIMD_WIDTH; ++i) {
    std::memcpy(simdgroups[group].lanes + i * PAYLOAD_BYTES, first[i].payload, PAYLOAD_BYTES);
    first[i].state = State::ready;
  }
  return true;
}

// Lets all threads pass if they stand at one barrier. False if all are done.
inline bool release_barrier() {
  Thread* waiting = nullptr;
  for (Thread& thread : threads) {
    if (thread.state == State::at_barrier) waiting = &thread;
  }
  if (!waiting) return false;
  for (Thread& thread : threads) {
    running = &thread;
    if (thread.state != State::at_barrier) fail("a thread left without reaching a threadgroup barrier", waiting->line);
    if (thread.line != waiting->line) fail("threads wait at different threadgroup barriers", waiting->line);
    thread.state = State::ready;
  }
  if (barrier_orders_memory) ++epoch;
  return true;
}

inline void run_threadgroup() {
  group_start = ++epoch;
  std::vector<uint32_t> order(threads.size());
  for (Thread& thread : threads) thread.state = State::ready;
  for (;;) {
    put_in_order(order);
    for (uint32_t index : order) {
      if (threads[index].state != State::ready) continue;
      running = &threads[index];
      resume(running->fiber);
    }
    bool released = false;
    for (uint32_t group = 0; group < simdgroups.size(); ++group) released |= release_simdgroup(group);
    if (!released && !release_barrier()) return;
  }
}

inline void create_threads() {
  const uint32_t count = threadgroup_size.count();
  threads = std::vector<Thread>(count);
  simdgroups = std::vector<Simdgroup>(count / SIMD_WIDTH);
  for (uint32_t i = 0; i < count; ++i) {
    threads[i].index = i;
    create(threads[i].fiber, thread_entry);
  }
}

}  // namespace emulator
