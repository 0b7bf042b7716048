#include "ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace lora_stream {
namespace {

constexpr uint64_t kMagic = 0x6c6f72615f737472;  // "lora_str"
constexpr uint32_t kVersion = 1;
constexpr int kSpins = 200;
constexpr std::size_t kReasonBytes = 1024;

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "locks inside atomics are not shared between processes");

std::size_t round_up(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }

int64_t now_us() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000 + time.tv_nsec / 1000;
}

}  // namespace

struct Ring::Slot {
  alignas(64) std::atomic<uint64_t> number{0};  // 1 + the message that it holds or held; 0: none yet
  std::atomic<uint64_t> kept{0};                // the same, if a receiver keeps it for long
  std::atomic<uint64_t> bytes{0};
};

struct Ring::Receiver {
  alignas(64) std::atomic<uint64_t> generation{0};     // that it has accepted
  std::atomic<uint64_t> acknowledged[kMaxSlots] = {};  // for each slot the newest number that it has done with
  std::atomic<int32_t> pid{0};
  std::atomic<uint32_t> mail_size{0};
  char mail[kMailBytes] = {};
};

struct Ring::Layout {
  uint64_t magic = 0;
  uint32_t version = 0;
  int32_t num_slots = 0;
  uint64_t slot_bytes = 0;
  alignas(64) std::atomic<uint64_t> published{0};
  std::atomic<uint32_t> receivers_bell{0};           // rung by publish and abort
  alignas(64) std::atomic<uint32_t> sender_bell{0};  // rung by acknowledge, accept and abort
  std::atomic<int32_t> num_receivers{0};
  std::atomic<uint32_t> keeping{0};  // held while a receiver counts what is kept
  alignas(64) std::atomic<uint64_t> generation{0};
  std::atomic<uint64_t> aborting{0};  // claimed by the first who aborts this generation
  std::atomic<uint64_t> aborted{0};
  char reason[kReasonBytes] = {};
  // Message m stands at m % num_slots. It is not overwritten early: a slot becomes free, and another message possible,
  // only when all have acknowledged one of the at most num_slots messages that are under way, and they do so in order.
  std::atomic<int32_t> slot_of[kMaxSlots] = {};
  Slot slots[kMaxSlots];
  Receiver receivers[kMaxReceivers];

  static std::size_t size() { return round_up(sizeof(Layout), 4096); }
};

std::size_t Ring::bytes(int num_slots, std::size_t slot_bytes) {
  if (num_slots < 2 || num_slots > kMaxSlots) {
    throw std::invalid_argument("num_slots must be 2 to " + std::to_string(kMaxSlots) + ", got " +
                                std::to_string(num_slots));
  }
  if (slot_bytes == 0 || slot_bytes % kAlignment != 0 || slot_bytes > SIZE_MAX / 2 / kMaxSlots) {
    throw std::invalid_argument("slot_bytes must be a positive multiple of " + std::to_string(kAlignment) + ", got " +
                                std::to_string(slot_bytes));
  }
  return Layout::size() + num_slots * slot_bytes;
}

void Ring::format(void* memory, int num_slots, std::size_t slot_bytes) {
  auto* layout = new (memory) Layout;
  layout->num_slots = num_slots;
  layout->slot_bytes = slot_bytes;
  layout->version = kVersion;
  layout->magic = kMagic;
}

Ring::Ring(void* memory, std::size_t size) : layout_(static_cast<Layout*>(memory)) {
  if (size < Layout::size() || layout_->magic != kMagic) throw std::invalid_argument("the region holds no ring");
  if (layout_->version != kVersion) {
    throw std::invalid_argument("sender and engine run different versions of lora_stream (ring layouts " +
                                std::to_string(layout_->version) + " and " + std::to_string(kVersion) +
                                "); install the same on both sides");
  }
  if (size < bytes(layout_->num_slots, layout_->slot_bytes)) throw std::invalid_argument("the region is cut short");
}

int Ring::num_slots() const { return layout_->num_slots; }
std::size_t Ring::slot_bytes() const { return layout_->slot_bytes; }
int Ring::num_receivers() const { return layout_->num_receivers.load(std::memory_order_acquire); }
uint64_t Ring::num_published() const { return layout_->published.load(std::memory_order_acquire); }

std::byte* Ring::slot(int index) const {
  return reinterpret_cast<std::byte*>(layout_) + Layout::size() + index * layout_->slot_bytes;
}

bool Ring::is_free(const Slot& slot) const {
  const uint64_t number = slot.number.load(std::memory_order_acquire);
  const int index = static_cast<int>(&slot - layout_->slots);
  const int receivers = num_receivers();
  for (int i = 0; i < receivers; ++i) {
    if (layout_->receivers[i].acknowledged[index].load(std::memory_order_acquire) < number) return false;
  }
  return true;
}

int Ring::acquire(int64_t microseconds, uint64_t unpublished) {
  int found = -1;
  // Round the ring, so that a slot rests before it is written again: its lines leave the receivers' caches meanwhile.
  const int first = num_published() % layout_->num_slots;
  wait(layout_->sender_bell, microseconds, [&] {
    for (int i = 0; i < layout_->num_slots; ++i) {
      const int index = (first + i) % layout_->num_slots;
      if ((unpublished >> index & 1) == 0 && is_free(layout_->slots[index])) {
        found = index;
        return true;
      }
    }
    return false;
  });
  return found;
}

void Ring::publish(int index, std::size_t bytes) {
  const uint64_t message = layout_->published.load(std::memory_order_relaxed);
  Slot& slot = layout_->slots[index];
  slot.bytes.store(bytes, std::memory_order_relaxed);
  slot.number.store(message + 1, std::memory_order_release);
  layout_->slot_of[message % layout_->num_slots].store(index, std::memory_order_relaxed);
  layout_->published.store(message + 1, std::memory_order_release);
  ring_bell(layout_->receivers_bell);
}

uint64_t Ring::begin_generation() { return layout_->generation.fetch_add(1) + 1; }

int Ring::add_receiver(int pid) {
  const int index = layout_->num_receivers.fetch_add(1);
  if (index >= kMaxReceivers) {
    layout_->num_receivers.fetch_sub(1);
    throw std::length_error("a ring serves at most " + std::to_string(kMaxReceivers) + " receivers");
  }
  Receiver& self = layout_->receivers[index];
  self.pid.store(pid);
  for (int i = 0; i < layout_->num_slots; ++i) self.acknowledged[i].store(layout_->slots[i].number.load());
  return index;
}

void Ring::accept(int receiver, uint64_t generation, uint64_t first, uint64_t in_use) {
  Receiver& self = layout_->receivers[receiver];
  for (int i = 0; i < layout_->num_slots; ++i) {
    const uint64_t number = layout_->slots[i].number.load(std::memory_order_acquire);
    if (number <= first && (in_use >> i & 1) == 0) self.acknowledged[i].store(number, std::memory_order_release);
  }
  self.generation.store(generation, std::memory_order_release);
  ring_bell(layout_->sender_bell);
}

bool Ring::wait_published(uint64_t message, int64_t microseconds) {
  return wait(layout_->receivers_bell, microseconds, [&] { return num_published() > message; });
}

Ring::Slot& Ring::slot_of(uint64_t message) const {
  return layout_->slots[layout_->slot_of[message % layout_->num_slots].load(std::memory_order_relaxed)];
}

Ring::Message Ring::message(uint64_t message) const {
  const Slot& slot = slot_of(message);
  return {static_cast<int>(&slot - layout_->slots), slot.bytes.load(std::memory_order_relaxed)};
}

bool Ring::may_keep(uint64_t message) {
  Slot& slot = slot_of(message);
  if (slot.kept.load() == message + 1) return true;
  // Not a lock to wait for: its holder may have been killed. Who does not get it copies, which is always right.
  if (layout_->keeping.exchange(1) != 0) return false;
  int kept = 0;
  for (int i = 0; i < layout_->num_slots; ++i) {
    const Slot& other = layout_->slots[i];
    if (other.kept.load() == other.number.load() && !is_free(other)) ++kept;
  }
  const bool may = kept < layout_->num_slots - 2;
  if (may) slot.kept.store(message + 1);
  layout_->keeping.store(0);
  return may;
}

void Ring::acknowledge(int receiver, uint64_t message) {
  // The slot is found by its number, not by the table: a slot that was kept outlives its place there.
  for (int i = 0; i < layout_->num_slots; ++i) {
    if (layout_->slots[i].number.load(std::memory_order_acquire) == message + 1) {
      layout_->receivers[receiver].acknowledged[i].store(message + 1, std::memory_order_release);
    }
  }
  ring_bell(layout_->sender_bell);
}

bool Ring::has_accepted(int receiver, uint64_t generation) const {
  return layout_->receivers[receiver].generation.load(std::memory_order_acquire) >= generation;
}

bool Ring::wait_accepted(int receiver, uint64_t generation, int64_t microseconds) {
  return wait(layout_->sender_bell, microseconds, [&] { return has_accepted(receiver, generation); });
}

bool Ring::owes(int receiver) const {
  for (int i = 0; i < layout_->num_slots; ++i) {
    if (layout_->receivers[receiver].acknowledged[i].load(std::memory_order_acquire) <
        layout_->slots[i].number.load(std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

int Ring::pid(int receiver) const { return layout_->receivers[receiver].pid.load(); }

void Ring::abort(uint64_t generation, const std::string& reason) {
  uint64_t before = layout_->aborting.load();
  do {
    if (before >= generation) return;
  } while (!layout_->aborting.compare_exchange_weak(before, generation));
  const std::size_t size = std::min(reason.size(), kReasonBytes - 1);
  std::memcpy(layout_->reason, reason.data(), size);
  layout_->reason[size] = '\0';
  layout_->aborted.store(generation, std::memory_order_release);
  ring_bell(layout_->receivers_bell);
  ring_bell(layout_->sender_bell);
}

bool Ring::is_aborted(uint64_t generation) const {
  return generation != 0 && layout_->aborted.load(std::memory_order_acquire) >= generation;
}

std::string Ring::abort_reason() const {
  return std::string(layout_->reason, ::strnlen(layout_->reason, kReasonBytes));
}

void Ring::post(int receiver, const std::string& mail) {
  Receiver& self = layout_->receivers[receiver];
  const std::size_t size = std::min(mail.size(), kMailBytes);
  std::memcpy(self.mail, mail.data(), size);
  self.mail_size.store(static_cast<uint32_t>(size), std::memory_order_release);
}

std::string Ring::mail(int receiver) const {
  const Receiver& from = layout_->receivers[receiver];
  return std::string(from.mail, std::min<std::size_t>(from.mail_size.load(std::memory_order_acquire), kMailBytes));
}

template <class Ready>
bool Ring::wait(std::atomic<uint32_t>& bell, int64_t microseconds, Ready ready) {
  const uint64_t generation = layout_->generation.load();
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
  }
  const int64_t deadline = now_us() + microseconds;
  while (true) {
    const uint32_t before = bell.load();  // first: a bell that is rung after this makes the sleep below return at once
    if (ready()) return true;
    const int64_t left = deadline - now_us();
    if (left <= 0 || is_aborted(generation)) return false;
    timespec timeout{left / 1000000, left % 1000000 * 1000};
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAIT, before, &timeout, nullptr, 0);
  }
}

void Ring::ring_bell(std::atomic<uint32_t>& bell) {
  bell.fetch_add(1);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace lora_stream
