// A ring of slots in shared memory: one sender, several receivers, every receiver gets every message. No torch, no
// Python.
//
//   sender:    acquire ──► write into the slot ──► publish
//   receiver:  wait_published ──► read in place ──► acknowledge
//
// Message m = 0, 1, ... lies in the slot that the sender found free, not in slot m % num_slots: a receiver may go on
// reading a slot in place for long (vLLM keeps tensors until a whole module has come) while the others circulate. A
// slot is free again when every receiver has acknowledged the message in it. Messages count on for the life of the ring
// and never start again, so that nothing late can be taken for something new.
//
// An update is a *generation*. abort() gives one up, on either side, and wakes all who wait; the next one is not
// affected. All words are std::atomic: publish releases what was written before it to those who see the message,
// acknowledge releases the slot. Waiters spin shortly and then sleep in the kernel (futex) until a bell is rung.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace lora_stream {

class Ring {
 public:
  static constexpr int kMaxSlots = 64;
  static constexpr int kMaxReceivers = 64;
  static constexpr std::size_t kMailBytes = 4096;
  static constexpr std::size_t kAlignment = 256;  // of slots, and of what is laid into them

  struct Message {
    int slot;
    std::size_t bytes;
  };

  // Bytes of memory for a ring; slot_bytes must be a multiple of kAlignment, num_slots 2 to kMaxSlots.
  static std::size_t bytes(int num_slots, std::size_t slot_bytes);
  // Lays a ring out in zeroed memory of that size, aligned to a page. The sender does it, before anybody attaches.
  static void format(void* memory, int num_slots, std::size_t slot_bytes);
  // A ring that has been laid out. Throws std::invalid_argument if it was not, or by another version.
  Ring(void* memory, std::size_t size);

  int num_slots() const;
  std::size_t slot_bytes() const;
  std::byte* slot(int index) const;
  int num_receivers() const;
  uint64_t num_published() const;

  // -- sender --
  // A free slot that is not in `unpublished` (a bit each: what has been acquired and is being filled), or -1 when none
  // became free within `microseconds` or the bell was rung for another reason.
  int acquire(int64_t microseconds, uint64_t unpublished = 0);
  void publish(int slot, std::size_t bytes);
  // Begins the next generation; its first message is num_published().
  uint64_t begin_generation();

  // -- receivers --
  int add_receiver(int pid);  // its index; throws std::length_error when there are kMaxReceivers
  // Agrees to take the messages of a generation from `first` on; drops those before that were never read. Slots in
  // `in_use` (a bit each) are still read in place and stay as they are.
  void accept(int receiver, uint64_t generation, uint64_t first, uint64_t in_use);
  bool wait_published(uint64_t message, int64_t microseconds);
  Message message(uint64_t message) const;  // of one that is published and not acknowledged
  // Whether the slot may be kept for long. No more than all but two slots are, by all receivers together, so that the
  // rest can always circulate; where this says no, the receiver must copy what it wants to keep, and acknowledge.
  bool may_keep(uint64_t message);
  void acknowledge(int receiver, uint64_t message);

  // -- both --
  bool wait_accepted(int receiver, uint64_t generation, int64_t microseconds);
  bool has_accepted(int receiver, uint64_t generation) const;
  bool owes(int receiver) const;  // whether it has not acknowledged something
  int pid(int receiver) const;
  void abort(uint64_t generation, const std::string& reason);  // the first reason counts
  bool is_aborted(uint64_t generation) const;
  std::string abort_reason() const;
  // A note from a receiver to the sender; truncated to kMailBytes. To be read when the receiver has been heard to be
  // ready.
  void post(int receiver, const std::string& mail);
  std::string mail(int receiver) const;

 private:
  struct Layout;
  struct Slot;
  struct Receiver;

  bool is_free(const Slot& slot) const;
  Slot& slot_of(uint64_t message) const;
  template <class Ready>
  bool wait(std::atomic<uint32_t>& bell, int64_t microseconds, Ready ready);
  static void ring_bell(std::atomic<uint32_t>& bell);

  Layout* layout_;
};

}  // namespace lora_stream
