#include "region.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace lora_stream {
namespace {

constexpr char kDirectory[] = "/dev/shm/";
constexpr char kPrefix[] = "lora_stream-";

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Open region files of this process. A forked child (a data loader's worker, say) must not keep them open: it would
// hold the locks of a parent that has died.
std::mutex fds_mutex;
std::vector<int> fds;

void remember(int fd) {
  static const int registered = pthread_atfork([] { fds_mutex.lock(); }, [] { fds_mutex.unlock(); },
                                               [] {
                                                 for (const int fd : fds) ::close(fd);
                                                 fds.clear();
                                                 fds_mutex.unlock();
                                               });
  if (registered != 0) fail(registered, "pthread_atfork");
  const std::lock_guard<std::mutex> guard(fds_mutex);
  fds.push_back(fd);
}

void forget(int fd) {
  const std::lock_guard<std::mutex> guard(fds_mutex);
  fds.erase(std::remove(fds.begin(), fds.end(), fd), fds.end());
  ::close(fd);
}

struct flock lock_of(int place) {
  struct flock lock{};  // l_pid must be 0 for locks that belong to the open file and not to the process
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

bool is_held_by_others(int fd, int place) {
  struct flock lock = lock_of(place);
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) fail(errno, "cannot ask whether a peer lives");
  return lock.l_type != F_UNLCK;
}

std::string random_name() {
  uint64_t words[2];
  if (::getrandom(words, sizeof(words), 0) != sizeof(words)) fail(errno, "no random numbers");
  char name[128];
  std::snprintf(name, sizeof(name), "%s%d-%016llx%016llx", kPrefix, ::getpid(),
                static_cast<unsigned long long>(words[0]), static_cast<unsigned long long>(words[1]));
  return name;
}

std::string mib(double bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.1f MiB", bytes / (1024 * 1024));
  return text;
}

std::string free_space() {
  struct statvfs stat{};
  if (::statvfs(kDirectory, &stat) != 0) return "its free space is unknown";
  return "it has " + mib(static_cast<double>(stat.f_bavail) * stat.f_frsize) + " free of " +
         mib(static_cast<double>(stat.f_blocks) * stat.f_frsize);
}

}  // namespace

Region::Region(int fd, std::size_t size) : pid_(::getpid()), size_(size) {
  data_ = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int map_error = data_ == MAP_FAILED ? errno : 0;
  // Opened once more for the locks: a mapping keeps its open file, and with it the locks, alive in forked children.
  if (map_error == 0) fd_ = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
  const int open_error = errno;
  ::close(fd);
  if (map_error != 0) fail(map_error, "cannot map " + mib(size) + " of shared memory");
  if (fd_ < 0) {
    ::munmap(data_, size);
    fail(open_error, "cannot open shared memory again (is /proc mounted?)");
  }
  remember(fd_);
}

Region::~Region() {
  ::munmap(data_, size_);
  unlink();
  if (::getpid() == pid_) forget(fd_);
}

std::shared_ptr<Region> Region::create(std::size_t bytes) {
  sweep();
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  const int fd = ::open(kDirectory, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) fail(errno, "cannot make shared memory in /dev/shm: mount a tmpfs there that this user may write to");
  const std::string space = free_space();
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    ::close(fd);
    fail(error, "cannot size " + mib(bytes) + " of shared memory");
  }
  std::shared_ptr<Region> region(new Region(fd, bytes));
  ::madvise(region->data_, bytes, MADV_HUGEPAGE);        // where the system has them for shared memory
  ::madvise(region->data_, bytes, MADV_POPULATE_WRITE);  // with huge pages, which fallocate alone does not give
  const int error =
      ::posix_fallocate(region->fd_, 0, static_cast<off_t>(bytes));  // a page that is missing later is a SIGBUS
  if (error != 0) {
    fail(error, "cannot reserve " + mib(bytes) + " of shared memory in /dev/shm, " + space +
                    ": enlarge it (containers: --shm-size or --ipc=host) or ask for less staging");
  }
  region->locked_ = ::mlock(region->data_, bytes) == 0;
  region->hold(0);
  return region;
}

std::shared_ptr<Region> Region::attach(const std::string& name) {
  sweep();
  if (name.rfind(kPrefix, 0) != 0 || name.find('/') != std::string::npos) {
    fail(EINVAL, "'" + name + "' is not the name of a region of lora_stream");
  }
  const int fd = ::open((kDirectory + name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) {
    const int error = errno;
    fail(error, "cannot open the sender's region /dev/shm/" + name +
                    (error == EACCES ? ": it belongs to another user; run sender and engine as one user"
                                     : ": sender and engine must run on one host and share /dev/shm (containers: "
                                       "--ipc=host), and the sender must still run"));
  }
  struct stat stat{};
  if (::fstat(fd, &stat) != 0 || stat.st_size <= 0) {
    ::close(fd);
    fail(EINVAL, "/dev/shm/" + name + " is not a region");
  }
  std::shared_ptr<Region> region(new Region(fd, static_cast<std::size_t>(stat.st_size)));
  ::madvise(region->data_, region->size_, MADV_HUGEPAGE);
  return region;
}

int Region::sweep() {
  DIR* directory = ::opendir(kDirectory);
  if (directory == nullptr) return 0;
  int swept = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    if (name.rfind(kPrefix, 0) != 0) continue;
    const int fd = ::open((kDirectory + name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) continue;  // another user's, or gone meanwhile
    // A region is linked after its owner's lock was taken: one without it has lost its owner.
    if (!is_held_by_others(fd, 0) && ::unlink((kDirectory + name).c_str()) == 0) ++swept;
    ::close(fd);
  }
  ::closedir(directory);
  return swept;
}

const std::string& Region::link() {
  if (!name_.empty()) return name_;
  const std::string name = random_name();
  const std::string self = "/proc/self/fd/" + std::to_string(fd_);
  if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, (kDirectory + name).c_str(), AT_SYMLINK_FOLLOW) != 0) {
    fail(errno, "cannot name the shared memory /dev/shm/" + name + " (is /proc mounted?)");
  }
  name_ = name;
  return name_;
}

void Region::unlink() {
  if (name_.empty() || ::getpid() != pid_) return;
  ::unlink((kDirectory + name_).c_str());
  name_.clear();
}

void Region::hold(int place) {
  struct flock lock = lock_of(place);
  if (::fcntl(fd_, F_OFD_SETLK, &lock) != 0) fail(errno, "cannot lock place " + std::to_string(place) + " of a region");
}

bool Region::is_held(int place) const { return is_held_by_others(fd_, place); }

}  // namespace lora_stream
