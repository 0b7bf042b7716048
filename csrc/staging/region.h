// Memory that the processes of one host share, and that is gone when they are. No torch and no Python here.
//
//   owner:  create ──► link ──► (tell the name) ──► unlink ──► use        peers:  attach ──► use
//
// The region has a name only from link() to unlink(), while peers attach. Outside of that nothing is left in /dev/shm
// whatever happens to the processes; a name whose owner was killed in between is swept by the next create() or
// attach().
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace lora_stream {

class Region {
 public:
  // A new region of at least `bytes`, zeroed, readable and writable by this user alone. All of it is reserved at once.
  // Throws std::system_error with what to do, ENOSPC where /dev/shm is too small.
  static std::shared_ptr<Region> create(std::size_t bytes);

  // The region that another process, or this one, has linked under `name`. Throws std::system_error: ENOENT where there
  // is none, EACCES where it is another user's.
  static std::shared_ptr<Region> attach(const std::string& name);

  // Unlinks the names whose owners are gone; returns how many.
  static int sweep();

  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& link();  // gives the region its random name; once in its life
  void unlink();              // takes it back; harmless where there is none

  // Processes tell that they live by a lock on a place of the file: the kernel drops it when they die, however they do.
  // Place 0 is the owner's, held from the start.
  void hold(int place);
  bool is_held(int place) const;  // by another region object, in this process or another

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool locked() const { return locked_; }  // whether the system agreed never to swap it out

 private:
  Region(int fd, std::size_t size);

  int fd_ = -1;
  int pid_ = 0;  // of the process that made this object; a forked child inherits it and must leave name and fd alone
  void* data_ = nullptr;
  std::size_t size_ = 0;
  bool locked_ = false;
  std::string name_;  // empty while the region has none
};

}  // namespace lora_stream
