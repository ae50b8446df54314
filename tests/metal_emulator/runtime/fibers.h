// One fiber per GPU thread: a stack of its own and a switch to and from the scheduler.
//
// Plain C, not tied to a CPU: ucontext starts a fiber on its stack; setjmp and longjmp switch afterwards, because they
// make no system call. The sanitizers must be told of every switch, and understand swapcontext, so they use that.
#pragma once
#include <csetjmp>
#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#include <ucontext.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATOR_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_SANITIZED 1
#endif

#ifdef EMULATOR_SANITIZED
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, std::size_t* size);
}
#endif

namespace emulator {

constexpr std::size_t STACK_BYTES = 256 * 1024;

struct Fiber {
  ucontext_t context;
  jmp_buf point;
  char* stack = nullptr;
  bool started = false;
};

struct Scheduler_side {
  ucontext_t context;
  jmp_buf point;
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
};

inline Scheduler_side scheduler_side;

inline void create(Fiber& fiber, void (*entry)()) {
  void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED || getcontext(&fiber.context) != 0) {
    std::perror("emulator: no stack for a fiber");
    std::exit(4);
  }
  fiber.stack = static_cast<char*>(stack);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#ifdef EMULATOR_SANITIZED

// Called first thing by a fiber that runs for the first time.
inline void arrived() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_side.stack, &scheduler_side.stack_bytes); }

inline void resume(Fiber& fiber) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack, STACK_BYTES);
  swapcontext(&scheduler_side.context, &fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

inline void suspend(Fiber& fiber) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, scheduler_side.stack, scheduler_side.stack_bytes);
  swapcontext(&fiber.context, &scheduler_side.context);
  __sanitizer_finish_switch_fiber(fake_stack, &scheduler_side.stack, &scheduler_side.stack_bytes);
}

#else

inline void arrived() {}

inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler_side.point) != 0) return;
  if (fiber.started) _longjmp(fiber.point, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline void suspend(Fiber& fiber) {
  if (_setjmp(fiber.point) == 0) _longjmp(scheduler_side.point, 1);
}

#endif

}  // namespace emulator
