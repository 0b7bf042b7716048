// The ring's promises, with threads for processes, so that ThreadSanitizer sees both sides. Built with it by
// CMakeLists.txt.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "../../csrc/staging/region.h"
#include "../../csrc/staging/ring.h"

using lora_stream::Region;
using lora_stream::Ring;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

constexpr int64_t kSlice = 50'000;  // microseconds
constexpr std::size_t kSlotBytes = 4096;

struct Memory {
  std::shared_ptr<Region> region;
  explicit Memory(int num_slots) : region(Region::create(Ring::bytes(num_slots, kSlotBytes))) {
    Ring::format(region->data(), num_slots, kSlotBytes);
  }
  Ring ring() { return Ring(region->data(), region->size()); }
};

void fill(std::byte* at, uint64_t message, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 8) {
    const uint64_t value = message * 1'000'003 + i;
    std::memcpy(at + i, &value, 8);
  }
}

bool holds(const std::byte* at, uint64_t message, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 8) {
    uint64_t value;
    std::memcpy(&value, at + i, 8);
    if (value != message * 1'000'003 + i) return false;
  }
  return true;
}

std::size_t size_of(uint64_t message) { return 8 + message * 56 % (kSlotBytes - 8) / 8 * 8; }

void send(Ring ring, uint64_t first, uint64_t count) {
  for (uint64_t message = first; message < first + count; ++message) {
    int slot = -1;
    while (slot < 0) slot = ring.acquire(kSlice);
    fill(ring.slot(slot), message, size_of(message));
    ring.publish(slot, size_of(message));
  }
}

// Reads everything in order; keeps what it may keep until `module` messages have come, as vLLM's layerwise reload does.
void receive(Ring ring, int self, uint64_t first, uint64_t count, uint64_t module, int delay_us) {
  std::mt19937 random(self);
  std::vector<uint64_t> kept;
  for (uint64_t message = first; message < first + count; ++message) {
    while (!ring.wait_published(message, kSlice)) {
    }
    const Ring::Message at = ring.message(message);
    CHECK(at.bytes == size_of(message));
    CHECK(holds(ring.slot(at.slot), message, at.bytes));
    if (delay_us > 0 && random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (ring.may_keep(message)) {
      kept.push_back(message);
    } else {
      ring.acknowledge(self, message);
    }
    if ((message + 1) % module == 0) {
      for (const uint64_t old : kept) ring.acknowledge(self, old);
      kept.clear();
    }
  }
  for (const uint64_t old : kept) ring.acknowledge(self, old);
}

void every_receiver_gets_every_message_at_any_speed() {
  for (const int num_slots : {2, 3, 8}) {
    Memory memory(num_slots);
    Ring ring = memory.ring();
    std::vector<std::thread> threads;
    // Modules of more messages than there are slots, receivers of different speeds, some that release at other times.
    const uint64_t modules[] = {1, 5, 40, 40};
    const int delays[] = {0, 300, 0, 100};
    for (int i = 0; i < 4; ++i) {
      const int self = ring.add_receiver(1000 + i);
      CHECK(self == i);
      threads.emplace_back(receive, memory.ring(), self, 0, 600, modules[i], delays[i]);
    }
    send(memory.ring(), 0, 600);
    for (auto& thread : threads) thread.join();
    for (int i = 0; i < 4; ++i) CHECK(!ring.owes(i));
  }
}

void a_slot_that_is_read_in_place_is_not_written() {
  Memory memory(4);
  Ring ring = memory.ring();
  const int self = ring.add_receiver(1);
  send(ring, 0, 1);
  CHECK(ring.may_keep(0));
  const std::byte* kept = ring.slot(ring.message(0).slot);
  for (uint64_t message = 1; message < 50; ++message) {
    send(ring, message, 1);
    CHECK(ring.slot(ring.message(message).slot) != kept);
    ring.acknowledge(self, message);
  }
  CHECK(holds(kept, 0, size_of(0)));
  CHECK(ring.owes(self));
  ring.acknowledge(self, 0);
  CHECK(!ring.owes(self));
}

void all_but_two_slots_can_be_kept() {
  Memory memory(5);
  Ring ring = memory.ring();
  const int one = ring.add_receiver(1), two = ring.add_receiver(2);
  send(ring, 0, 5);
  for (uint64_t message = 0; message < 3; ++message) CHECK(ring.may_keep(message));
  CHECK(!ring.may_keep(3));
  CHECK(ring.may_keep(1));  // kept already, by another: no slot more
  for (const int self : {one, two}) ring.acknowledge(self, 0);
  CHECK(ring.may_keep(3));
}

void a_full_ring_waits_and_a_receiver_that_never_acknowledges_is_known() {
  Memory memory(3);
  Ring ring = memory.ring();
  const int good = ring.add_receiver(11), bad = ring.add_receiver(22);
  send(ring, 0, 3);
  for (uint64_t message = 0; message < 3; ++message) ring.acknowledge(good, message);
  CHECK(ring.acquire(1000) == -1);
  CHECK(!ring.owes(good));
  CHECK(ring.owes(bad));
  CHECK(ring.pid(bad) == 22);
}

void an_abort_wakes_both_sides_and_spares_the_next_generation() {
  Memory memory(2);
  Ring ring = memory.ring();
  const int self = ring.add_receiver(1);
  const uint64_t generation = ring.begin_generation();
  send(ring, 0, 2);
  std::thread sender([&] {
    Ring mine = memory.ring();
    while (!mine.is_aborted(generation)) CHECK(mine.acquire(60'000'000) == -1);
  });
  std::thread receiver([&] {
    Ring mine = memory.ring();
    while (!mine.is_aborted(generation)) CHECK(!mine.wait_published(2, 60'000'000));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ring.abort(generation, "first reason");
  ring.abort(generation, "second reason");
  sender.join();
  receiver.join();
  CHECK(ring.abort_reason() == "first reason");
  const uint64_t next = ring.begin_generation();
  CHECK(!ring.is_aborted(next));
  ring.accept(self, next, ring.num_published(), 0);  // drops what was never read
  CHECK(ring.has_accepted(self, next));
  CHECK(!ring.owes(self));
  send(ring, 2, 2);
  CHECK(ring.wait_published(3, kSlice));
}

void accept_leaves_what_is_still_read_in_place() {
  Memory memory(4);
  Ring ring = memory.ring();
  const int self = ring.add_receiver(1);
  send(ring, 0, 3);
  const int slot = ring.message(1).slot;
  ring.accept(self, ring.begin_generation(), 3, uint64_t{1} << slot);
  CHECK(ring.owes(self));
  for (uint64_t message = 3; message < 20; ++message) {
    send(ring, message, 1);
    CHECK(ring.message(message).slot != slot);
    ring.acknowledge(self, message);
  }
  CHECK(holds(ring.slot(slot), 1, size_of(1)));
  ring.acknowledge(self, 1);
  CHECK(!ring.owes(self));
}

void mail_arrives_and_is_cut_at_its_limit() {
  Memory memory(2);
  Ring ring = memory.ring();
  const int self = ring.add_receiver(1);
  ring.post(self, "hello");
  CHECK(ring.mail(self) == "hello");
  ring.post(self, std::string(Ring::kMailBytes + 10, 'x'));
  CHECK(ring.mail(self) == std::string(Ring::kMailBytes, 'x'));
}

template <class Error, class Body>
bool throws(Body body) {
  try {
    body();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void wrong_sizes_and_foreign_memory_are_refused() {
  CHECK(throws<std::invalid_argument>([] { Ring::bytes(1, kSlotBytes); }));
  CHECK(throws<std::invalid_argument>([] { Ring::bytes(Ring::kMaxSlots + 1, kSlotBytes); }));
  CHECK(throws<std::invalid_argument>([] { Ring::bytes(4, 100); }));
  CHECK(throws<std::invalid_argument>([] { Ring::bytes(4, 0); }));
  std::vector<std::byte> zeros(Ring::bytes(2, kSlotBytes) + 4096);
  CHECK(throws<std::invalid_argument>([&] { Ring(zeros.data(), zeros.size()); }));
  Memory memory(2);
  CHECK(throws<std::invalid_argument>([&] { Ring(memory.region->data(), memory.region->size() - 4096); }));
  CHECK(throws<std::length_error>([&] {
    for (int i = 0; i <= Ring::kMaxReceivers; ++i) memory.ring().add_receiver(i);
  }));
  CHECK(memory.ring().num_receivers() == Ring::kMaxReceivers);
}

void a_region_has_a_name_only_while_it_is_linked_and_its_holders_are_known() {
  auto owner = Region::create(10'000);
  CHECK(owner->size() == 12'288);
  const std::string name = owner->link();
  auto peer = Region::attach(name);
  CHECK(peer->is_held(0));
  CHECK(!owner->is_held(1));
  peer->hold(1);
  CHECK(owner->is_held(1));
  static_cast<char*>(owner->data())[5] = 'x';
  CHECK(static_cast<char*>(peer->data())[5] == 'x');
  CHECK(Region::sweep() == 0);  // owned
  peer.reset();
  CHECK(!owner->is_held(1));
  Region::attach(name);  // attaching and leaving unlinks nothing
  owner->unlink();
  CHECK(throws<std::system_error>([&] { Region::attach(name); }));
  CHECK(throws<std::system_error>([&] { Region::attach("../etc/passwd"); }));
  auto other = Region::create(1);
  const std::string again = other->link();
  CHECK(again != name);
  other.reset();
  CHECK(throws<std::system_error>([&] { Region::attach(again); }));
}

int main() {
  every_receiver_gets_every_message_at_any_speed();
  a_slot_that_is_read_in_place_is_not_written();
  all_but_two_slots_can_be_kept();
  a_full_ring_waits_and_a_receiver_that_never_acknowledges_is_known();
  an_abort_wakes_both_sides_and_spares_the_next_generation();
  accept_leaves_what_is_still_read_in_place();
  mail_arrives_and_is_cut_at_its_limit();
  wrong_sizes_and_foreign_memory_are_refused();
  a_region_has_a_name_only_while_it_is_linked_and_its_holders_are_known();
}
