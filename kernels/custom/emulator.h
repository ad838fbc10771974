// Runs a CUDA kernel on the CPU, one thread at a time, with barriers, warps and checked memory.
//
// Tensors are copied between pages that can't be touched, so that an access outside of them is caught where it happens;
// what is only read lies in pages that can't be written. A thread runs until it has to wait for others; those that
// never wait share one stack.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-isolate-erroneous-paths-dereference")  // else divisions by zero become traps
#endif

#if __has_include(<cuda_runtime.h>)
#include <cuda_runtime.h>
#endif
#if __has_include(<cuda_bf16.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "guarded.h"

// An assertion of the kernel comes here, and not to the C library, which would end the process.
extern "C" [[gnu::visibility("hidden"), noreturn]] void __assert_fail(const char*, const char*, unsigned,
                                                                      const char*) noexcept;
#include <cassert>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__
#ifndef __restrict__
#define __restrict__ __restrict
#endif

namespace headrace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

enum Kind : int32_t { kFine, kAccess, kBarrier, kTrap, kOverwritten, kMemory, kDivision, kAssertion };

// What went wrong, and where. `tensor` is -1 outside of all, -2 for dynamic shared memory, -3 for a thread's stack.
struct Report {
  int32_t kind, writes, tensor, line, other_line;
  uint32_t block, thread;
  int64_t offset_bytes;  // from the tensor's start
  uint64_t code_offset;  // of the instruction, in this library
  const char* assertion;
};

struct Tensor {
  void* data;
  int64_t bytes;
  int32_t read_only;
};

struct Fiber {
  ucontext_t context;
  Stack stack;
};

enum class State { kFresh, kRunning, kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Thread {
  State state = State::kFresh;
  Fiber* fiber = nullptr;
  unsigned mask = 0;
  int line = 0;
  uint64_t slot = 0;
};

// The one run that is going on.
struct Machine {
  std::vector<Thread> threads;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  Fiber* active = nullptr;
  ucontext_t scheduler;
  void (*body)(void* const*) = nullptr;
  void* const* arguments = nullptr;
  std::vector<std::unique_ptr<Guarded>> tensors;
  std::unique_ptr<Guarded> shared;
  Report* report = nullptr;
  pthread_t runner;
  int current = 0;
  int fresh = 0;
  volatile bool faulted = false;
  struct sigaction old_segv, old_bus, old_ill, old_fpe;
};

inline Machine* machine = nullptr;
inline void* shared_pointer = nullptr;
inline Index thread_index, block_index, block_size, grid_size;

inline void enter(int thread) {
  machine->current = thread;
  thread_index.x = static_cast<unsigned>(thread);
}

// A fiber runs fresh threads one after the other; where one has to wait, another fiber goes on with the next.
inline void fiber_main() {
  Machine& m = *machine;
  for (;;) {
    while (m.fresh < static_cast<int>(m.threads.size())) {
      enter(m.fresh++);
      m.threads[m.current].state = State::kRunning;
      m.threads[m.current].fiber = m.active;
      m.body(m.arguments);
      m.threads[m.current].state = State::kDone;
    }
    Fiber* self = m.active;
    m.idle.push_back(self);
    swapcontext(&self->context, &m.scheduler);
  }
}

inline void wait(State state, unsigned mask, int line) {
  Thread& self = machine->threads[machine->current];
  self.state = state;
  self.mask = mask;
  self.line = line;
  swapcontext(&self.fiber->context, &machine->scheduler);
}

inline bool resume(Fiber* fiber) {
  machine->active = fiber;
  swapcontext(&machine->scheduler, &fiber->context);
  return !machine->faulted;
}

inline Fiber* take_fiber() {
  Machine& m = *machine;
  if (!m.idle.empty()) {
    Fiber* fiber = m.idle.back();
    m.idle.pop_back();
    return fiber;
  }
  auto fiber = std::make_unique<Fiber>();
  if (fiber->stack.base() == nullptr) return nullptr;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.base();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, fiber_main, 0);
  m.fibers.push_back(std::move(fiber));
  return m.fibers.back().get();
}

// Let go on those warps, or the block, of which all that have to be at the barrier are. Whether any could.
inline bool release() {
  std::vector<Thread>& threads = machine->threads;
  const int count = static_cast<int>(threads.size());
  bool any = false;
  for (int first = 0; first < count; first += kWarp) {
    const int end = std::min(first + kWarp, count);
    unsigned waiting = 0, gone = 0;
    for (int i = first; i < end; i++) {
      if (threads[i].state == State::kAtWarpBarrier) waiting |= 1u << (i - first);
      if (threads[i].state == State::kDone) gone |= 1u << (i - first);
    }
    if (end - first < kWarp) gone |= ~0u << (end - first);
    unsigned freed = 0;
    for (int i = first; i < end; i++)
      if ((waiting >> (i - first) & 1) && (threads[i].mask & ~waiting & ~gone) == 0) freed |= 1u << (i - first);
    for (int i = first; i < end; i++)
      if (freed >> (i - first) & 1) threads[i].state = State::kReady;
    any = any || freed != 0;
  }
  if (any) return true;
  const Thread* first = nullptr;
  for (const Thread& thread : threads) {
    if (thread.state == State::kDone) continue;
    if (thread.state != State::kAtBlockBarrier || (first != nullptr && first->line != thread.line)) return false;
    if (first == nullptr) first = &thread;
  }
  for (Thread& thread : threads)
    if (thread.state == State::kAtBlockBarrier) thread.state = State::kReady;
  return first != nullptr;
}

inline void report_barrier() {
  Report& report = *machine->report;
  report.kind = kBarrier;
  bool first = true;
  for (size_t i = 0; i < machine->threads.size(); i++) {
    const Thread& thread = machine->threads[i];
    if (thread.state == State::kDone) continue;
    if (first) {
      report.thread = static_cast<uint32_t>(i);
      report.line = report.other_line = thread.line;
      first = false;
    } else if (thread.line != report.line) {
      report.other_line = thread.line;
    }
  }
}

inline bool run_block() {
  Machine& m = *machine;
  std::fill(m.threads.begin(), m.threads.end(), Thread{});
  m.fresh = 0;
  for (;;) {
    bool ran = false;
    while (m.fresh < static_cast<int>(m.threads.size())) {
      Fiber* fiber = take_fiber();
      if (fiber == nullptr) {
        m.report->kind = kMemory;
        return false;
      }
      if (!resume(fiber)) return false;
      ran = true;
    }
    bool alive = false;
    for (size_t i = 0; i < m.threads.size(); i++) {
      Thread& thread = m.threads[i];
      if (thread.state == State::kReady) {
        thread.state = State::kRunning;
        enter(static_cast<int>(i));
        if (!resume(thread.fiber)) return false;
        ran = true;
      }
      alive = alive || thread.state != State::kDone;
    }
    if (!alive) return true;
    if (!release() && !ran) {
      report_barrier();
      return false;
    }
  }
}

inline void on_fault(int signal, siginfo_t* info, void* context) {
  if (machine == nullptr || !pthread_equal(pthread_self(), machine->runner)) {
    const struct sigaction& old = signal == SIGILL ? machine->old_ill
                                  : signal == SIGFPE ? machine->old_fpe
                                  : signal == SIGBUS ? machine->old_bus
                                                     : machine->old_segv;
    sigaction(signal, &old, nullptr);  // not ours: it happens again, and is met by whoever was there before
    return;
  }
  Report& report = *machine->report;
  report.kind = signal == SIGILL ? kTrap : signal == SIGFPE ? kDivision : kAccess;
  report.tensor = -1;
  uintptr_t code = 0;
#if defined(__x86_64__)
  const greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  report.writes = static_cast<int32_t>(registers[REG_ERR] >> 1 & 1);
  code = static_cast<uintptr_t>(registers[REG_RIP]);
#elif defined(__aarch64__)
  code = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
  report.writes = -1;
#endif
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(code), &library) != 0)
    report.code_offset = code - reinterpret_cast<uintptr_t>(library.dli_fbase);
  if (report.kind == kAccess) {
    for (size_t i = 0; i < machine->tensors.size(); i++)
      if (machine->tensors[i]->holds(info->si_addr)) {
        report.tensor = static_cast<int32_t>(i);
        report.offset_bytes = machine->tensors[i]->offset(info->si_addr);
      }
    if (machine->shared != nullptr && machine->shared->holds(info->si_addr)) {
      report.tensor = -2;
      report.offset_bytes = machine->shared->offset(info->si_addr);
    }
    for (const auto& fiber : machine->fibers)
      if (fiber->stack.holds(info->si_addr)) report.tensor = -3;
  }
  report.thread = static_cast<uint32_t>(machine->current);
  machine->faulted = true;
  setcontext(&machine->scheduler);
}

[[noreturn]] inline void fail_assertion(const char* assertion, unsigned line) {
  if (machine == nullptr || !pthread_equal(pthread_self(), machine->runner)) std::abort();
  Report& report = *machine->report;
  report.kind = kAssertion;
  report.assertion = assertion;
  report.line = static_cast<int32_t>(line);
  report.thread = static_cast<uint32_t>(machine->current);
  machine->faulted = true;
  setcontext(&machine->scheduler);
  std::abort();
}

// Takes the signals of bad accesses and divisions for as long as it lives.
class Handlers {
 public:
  Handlers() : stack_(SIGSTKSZ * 4) {
    stack_t stack{};
    stack.ss_sp = stack_.data();
    stack.ss_size = stack_.size();
    sigaltstack(&stack, &old_stack_);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &machine->old_segv);
    sigaction(SIGBUS, &action, &machine->old_bus);
    sigaction(SIGILL, &action, &machine->old_ill);
    sigaction(SIGFPE, &action, &machine->old_fpe);
  }
  ~Handlers() {
    sigaction(SIGSEGV, &machine->old_segv, nullptr);
    sigaction(SIGBUS, &machine->old_bus, nullptr);
    sigaction(SIGILL, &machine->old_ill, nullptr);
    sigaction(SIGFPE, &machine->old_fpe, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }
  Handlers(const Handlers&) = delete;
  Handlers& operator=(const Handlers&) = delete;

 private:
  std::vector<char> stack_;
  stack_t old_stack_;
};

// A pointer that `run` sets: what is declared outside of functions refers to it before there is a block.
template <class T>
T*& dynamic_shared() {
  return reinterpret_cast<T*&>(shared_pointer);
}

inline void run_blocks(uint32_t blocks) {
  for (uint32_t i = 0; i < blocks; i++) {
    machine->report->block = block_index.x = i;
    if (machine->shared != nullptr) machine->shared->fill(kCanary, kUnwritten);
    if (!run_block()) return;
    if (machine->shared != nullptr && machine->shared->overwritten() != 0) {
      machine->report->kind = kOverwritten;
      machine->report->tensor = -2;
      machine->report->offset_bytes = machine->shared->overwritten();
      return;
    }
  }
}

// `arguments` point at the kernel's parameters; those at tensors are set here, in the order of `tensors`.
inline void run(void (*body)(void* const*), const Tensor* tensors, int32_t tensor_count, void** const* pointers,
                void* const* arguments, uint32_t blocks, uint32_t threads, int64_t shared_bytes, Report* report) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  Machine own;
  own.report = report;
  own.body = body;
  own.arguments = arguments;
  own.runner = pthread_self();
  own.threads.resize(threads);
  report->kind = kMemory;
  for (int32_t i = 0; i < tensor_count; i++) {
    own.tensors.push_back(std::make_unique<Guarded>(static_cast<size_t>(tensors[i].bytes)));
    Guarded& guarded = *own.tensors.back();
    if (!guarded.ok()) return;
    guarded.fill(kCanary, kUnwritten);
    if (tensors[i].read_only != 0) {
      std::memcpy(guarded.data(), tensors[i].data, static_cast<size_t>(tensors[i].bytes));
      if (!guarded.forbid_writes()) return;
    }
    *pointers[i] = guarded.data();
  }
  if (shared_bytes > 0) {
    own.shared = std::make_unique<Guarded>(static_cast<size_t>(shared_bytes));
    if (!own.shared->ok()) return;
    shared_pointer = own.shared->data();
  }
  report->kind = kFine;
  block_size = {threads, 1, 1};
  grid_size = {blocks, 1, 1};
  thread_index = {};
  block_index = {};
  machine = &own;
  {
    const Handlers handlers;
    run_blocks(blocks);
  }
  machine = nullptr;
  for (int32_t i = 0; i < tensor_count && report->kind == kFine; i++) {
    if (tensors[i].read_only != 0) continue;
    report->offset_bytes = own.tensors[i]->overwritten();
    if (report->offset_bytes != 0) {
      report->kind = kOverwritten;
      report->tensor = i;
      return;
    }
    std::memcpy(tensors[i].data, own.tensors[i]->data(), static_cast<size_t>(tensors[i].bytes));
  }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void* const* arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(arguments[I])...);
}

template <class... A>
void call(void (*kernel)(A...), void* const* arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}

template <class... A>
int32_t parameter_sizes(void (*)(A...), int32_t* sizes, int32_t most) {
  const int32_t own[] = {static_cast<int32_t>(sizeof(A))..., 0};
  for (int32_t i = 0; i < most && i < static_cast<int32_t>(sizeof...(A)); i++) sizes[i] = own[i];
  return static_cast<int32_t>(sizeof...(A));
}

}  // namespace headrace

extern "C" inline void __assert_fail(const char* assertion, const char*, unsigned line, const char*) noexcept {
  headrace::fail_assertion(assertion, line);
}
