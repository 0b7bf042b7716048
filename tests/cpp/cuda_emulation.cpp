// The scheduler of cuda_emulation.h: one block after the other, its threads as fibers that run from barrier to barrier.
//
// Compiled without -fsanitize=thread, its own state is no concern of it. LORA_STREAM_TSAN tells that the rest is:
// fibers are then switched without ordering what they did, and only barriers order, so that a missing one is a race.
// LORA_STREAM_ASAN: that AddressSanitizer must be told of the stacks.
#include "cuda_emulation.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#if defined(LORA_STREAM_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(LORA_STREAM_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace emulation {

Fault fault = Fault::kNone;
bool cut_sums = false;

namespace {

constexpr std::size_t kStackBytes = 256 * 1024;

void acquire([[maybe_unused]] void* address) {
#if defined(LORA_STREAM_TSAN)
  __tsan_acquire(address);
#endif
}

void release([[maybe_unused]] void* address) {
#if defined(LORA_STREAM_TSAN)
  __tsan_release(address);
#endif
}

// The addresses of `order` stand for its order: two in turns, since a fiber may arrive at the next round while others
// have not yet left this one, and must not be ordered after it.
struct Barrier {
  unsigned arrived = 0, generation = 0;
  char order[2] = {};
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  bool done = false;
  void* tsan = nullptr;
  void* fake_stack = nullptr;
  std::vector<std::vector<Copy>> copies{1};
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warp_barriers;
  std::vector<Exchange> exchanges;
  Barrier barrier;
  unsigned index, num_blocks, running = 0, alive;
  std::size_t progress = 0;  // barriers reached and threads ended
  unsigned char* shared;
  void (*kernel)(void*);
  void* kernel_context;
  ucontext_t scheduler;
  void* scheduler_tsan = nullptr;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  std::size_t scheduler_stack_bytes = 0;
};

Block* current = nullptr;

void to_scheduler([[maybe_unused]] bool for_good) {
  Fiber& fiber = current->fibers[current->running];
#if defined(LORA_STREAM_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, current->scheduler_stack,
                                 current->scheduler_stack_bytes);
#endif
#if defined(LORA_STREAM_TSAN)
  __tsan_switch_to_fiber(current->scheduler_tsan, 1);
#endif
  swapcontext(&fiber.context, &current->scheduler);
#if defined(LORA_STREAM_ASAN)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &current->scheduler_stack, &current->scheduler_stack_bytes);
#endif
}

void to_fiber(Fiber& fiber) {
#if defined(LORA_STREAM_ASAN)
  __sanitizer_start_switch_fiber(&current->scheduler_fake_stack, fiber.stack.get(), kStackBytes);
#endif
#if defined(LORA_STREAM_TSAN)
  __tsan_switch_to_fiber(fiber.tsan, 1);
#endif
  swapcontext(&current->scheduler, &fiber.context);
#if defined(LORA_STREAM_ASAN)
  __sanitizer_finish_switch_fiber(current->scheduler_fake_stack, nullptr, nullptr);
#endif
}

void run_thread() {
#if defined(LORA_STREAM_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &current->scheduler_stack, &current->scheduler_stack_bytes);
#endif
  acquire(&current->kernel);
  current->kernel(current->kernel_context);
  release(&current->alive);
  current->fibers[current->running].done = true;
  --current->alive;
  ++current->progress;
  to_scheduler(true);
  std::abort();
}

void wait(Barrier& barrier, unsigned threads) {
  const unsigned generation = barrier.generation;
  ++current->progress;
  release(&barrier.order[generation & 1]);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) to_scheduler(false);
  }
  acquire(&barrier.order[generation & 1]);
}

void run_block(Block& block, std::mt19937* shuffle) {
  current = &block;
  release(&block.kernel);
#if defined(LORA_STREAM_TSAN)
  block.scheduler_tsan = __tsan_get_current_fiber();
#endif
  for (Fiber& fiber : block.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
    fiber.done = false;
    fiber.copies.assign(1, {});
#if defined(LORA_STREAM_TSAN)
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
  std::vector<unsigned> order(block.fibers.size());
  std::iota(order.begin(), order.end(), 0u);
  while (block.alive > 0) {
    if (shuffle != nullptr) std::shuffle(order.begin(), order.end(), *shuffle);
    const std::size_t before = block.progress;
    for (const unsigned thread : order) {
      if (block.fibers[thread].done) continue;
      block.running = thread;
      to_fiber(block.fibers[thread]);
    }
    if (block.progress == before && block.alive > 0) fail("deadlock: a barrier that not all threads reached");
  }
  acquire(&block.alive);
#if defined(LORA_STREAM_TSAN)
  for (Fiber& fiber : block.fibers) __tsan_destroy_fiber(fiber.tsan);
#endif
  current = nullptr;
}

}  // namespace

unsigned thread() { return current->running; }
unsigned block() { return current->index; }
unsigned num_blocks() { return current->num_blocks; }
unsigned char* shared_memory() { return current->shared; }
Exchange& exchange() { return current->exchanges[current->running / 32]; }
std::vector<std::vector<Copy>>& copies() { return current->fibers[current->running].copies; }
void warp_barrier() { wait(current->warp_barriers[current->running / 32], 32); }
void block_barrier() { wait(current->barrier, static_cast<unsigned>(current->fibers.size())); }

void launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, void (*kernel)(void*), void* context,
            unsigned seed) {
  if (fault == Fault::kShortMemory) shared_bytes -= 128;
  std::mt19937 generator(seed);
  Block block;
  block.fibers.resize(threads);
  block.exchanges.resize(threads / 32);
  block.num_blocks = blocks;
  block.kernel = kernel;
  block.kernel_context = context;
  for (block.index = 0; block.index < blocks; ++block.index) {
    block.warp_barriers.assign(threads / 32, {});
    block.barrier = {};
    block.alive = threads;
    // On the heap, where AddressSanitizer sees what goes past it. NaNs in every dtype.
    const std::size_t offset = fault == Fault::kMisalignedMemory ? 2 : 0;
    auto* const memory =
        static_cast<unsigned char*>(std::aligned_alloc(128, (shared_bytes + offset + 127) / 128 * 128));
    block.shared = memory + offset;
    std::memset(block.shared, 0xff, shared_bytes);
    run_block(block, seed != 0 ? &generator : nullptr);
    std::free(memory);
  }
}

}  // namespace emulation
