// The ring for Python: lora_stream/ring.py makes deadlines, peers and messages out of it.
#include "bind.h"

#include <fcntl.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "region.h"
#include "ring.h"

namespace py = pybind11;

namespace lora_stream {
namespace {

// One side's view of a ring.
struct Side {
  std::shared_ptr<Region> region;
  Ring ring;
  int receiver;  // its index; -1 for the sender
  int pid = ::getpid();
  std::atomic<uint64_t> in_use{0};  // slots that are read in place, a bit each

  Side(std::shared_ptr<Region> memory, int index)
      : region(std::move(memory)), ring(region->data(), region->size()), receiver(index) {}

  static std::shared_ptr<Side> create(int num_slots, std::size_t slot_bytes) {
    auto region = Region::create(Ring::bytes(num_slots, slot_bytes));
    Ring::format(region->data(), num_slots, slot_bytes);
    return std::make_shared<Side>(std::move(region), -1);
  }

  static std::shared_ptr<Side> attach(const std::string& name) {
    auto region = Region::attach(name);
    Ring ring(region->data(), region->size());
    const int index = ring.add_receiver(::getpid());
    region->hold(1 + index);
    return std::make_shared<Side>(std::move(region), index);
  }
};

// A message that is read in place. Dropping the last tensor that uses it is the acknowledgement.
struct Lease {
  std::shared_ptr<Side> side;
  uint64_t message;
  Ring::Message at;

  Lease(std::shared_ptr<Side> reader, uint64_t number)
      : side(std::move(reader)), message(number), at(side->ring.message(number)) {
    side->in_use |= uint64_t{1} << at.slot;
  }
  ~Lease() {
    if (::getpid() != side->pid) return;  // a forked child's copy
    side->in_use &= ~(uint64_t{1} << at.slot);
    side->ring.acknowledge(side->receiver, message);
  }
  Lease(const Lease&) = delete;
};

py::buffer_info bytes_at(std::byte* begin, std::size_t size) {
  return py::buffer_info(reinterpret_cast<uint8_t*>(begin), static_cast<py::ssize_t>(size));
}

}  // namespace

void bind_staging(py::module_& m) {
  // With its errno, Python makes FileNotFoundError, PermissionError and so on out of an OSError.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      const py::tuple args = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Side, std::shared_ptr<Side>>(m, "Ring", py::buffer_protocol(),
                                          "One side of a ring; see csrc/staging/ring.h.")
      .def_static("create", &Side::create, py::arg("num_slots"), py::arg("slot_bytes"), unlocked)
      .def_static("attach", &Side::attach, py::arg("name"), unlocked)
      .def("link", [](Side& self) { return self.region->link(); })
      .def("unlink", [](Side& self) { self.region->unlink(); })
      .def_property_readonly("locked", [](Side& self) { return self.region->locked(); })
      .def_property_readonly("address", [](Side& self) { return reinterpret_cast<uintptr_t>(self.region->data()); })
      .def_property_readonly("num_bytes", [](Side& self) { return self.region->size(); })
      .def_property_readonly("num_slots", [](Side& self) { return self.ring.num_slots(); })
      .def_property_readonly("slot_bytes", [](Side& self) { return self.ring.slot_bytes(); })
      .def_property_readonly("num_receivers", [](Side& self) { return self.ring.num_receivers(); })
      .def_property_readonly("num_published", [](Side& self) { return self.ring.num_published(); })
      .def_property_readonly("receiver", [](Side& self) { return self.receiver; })
      // All slots, one after the other.
      .def_buffer(
          [](Side& self) { return bytes_at(self.ring.slot(0), self.ring.num_slots() * self.ring.slot_bytes()); })
      .def("begin_generation", [](Side& self) { return self.ring.begin_generation(); })
      .def(
          "acquire",
          [](Side& self, int64_t us, const std::vector<int>& unpublished) {
            uint64_t mask = 0;
            for (const int slot : unpublished) mask |= uint64_t{1} << slot;
            return self.ring.acquire(us, mask);
          },
          py::arg("microseconds"), py::arg("unpublished") = std::vector<int>{}, unlocked)
      .def("publish", [](Side& self, int slot, std::size_t bytes) { self.ring.publish(slot, bytes); })
      .def("accept", [](Side& self, uint64_t generation,
                        uint64_t first) { self.ring.accept(self.receiver, generation, first, self.in_use); })
      .def(
          "wait_published",
          [](Side& self, uint64_t message, int64_t us) { return self.ring.wait_published(message, us); },
          py::arg("message"), py::arg("microseconds"), unlocked)
      .def(
          "wait_accepted",
          [](Side& self, int receiver, uint64_t generation, int64_t us) {
            return self.ring.wait_accepted(receiver, generation, us);
          },
          py::arg("receiver"), py::arg("generation"), py::arg("microseconds"), unlocked)
      .def("lease",
           [](const std::shared_ptr<Side>& self, uint64_t message) { return std::make_unique<Lease>(self, message); })
      .def("owes", [](Side& self, int receiver) { return self.ring.owes(receiver); })
      .def("pid", [](Side& self, int receiver) { return self.ring.pid(receiver); })
      .def("abort",
           [](Side& self, uint64_t generation, const std::string& reason) { self.ring.abort(generation, reason); })
      .def("is_aborted", [](Side& self, uint64_t generation) { return self.ring.is_aborted(generation); })
      .def("abort_reason", [](Side& self) { return py::bytes(self.ring.abort_reason()); })
      .def("post", [](Side& self, const py::bytes& mail) { self.ring.post(self.receiver, mail); })
      .def("mail", [](Side& self, int receiver) { return py::bytes(self.ring.mail(receiver)); })
      .def("sender_lives", [](Side& self) { return self.region->is_held(0); })
      .def("receiver_lives", [](Side& self, int receiver) { return self.region->is_held(1 + receiver); });

  py::class_<Lease>(m, "Lease", py::buffer_protocol(), "A message that is read in place; dropping it acknowledges it.")
      .def("may_keep", [](Lease& self) { return self.side->ring.may_keep(self.message); })
      .def_buffer([](Lease& self) { return bytes_at(self.side->ring.slot(self.at.slot), self.at.bytes); });

  m.def("sweep", &Region::sweep, "Unlink regions whose owners are gone; returns how many there were.");
  m.attr("RING_ALIGNMENT") = Ring::kAlignment;
  m.attr("RING_MAIL_BYTES") = Ring::kMailBytes;
}

}  // namespace lora_stream
