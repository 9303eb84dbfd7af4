#include "comm/shared_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>

#include "core/text.h"

namespace accelerate::detail::comm {

SharedPage::SharedPage() {
  fd_ = ::memfd_create("accelerate-call", MFD_CLOEXEC);
  const int flags = fd_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  if (fd_ >= 0 && ::ftruncate(fd_, sizeof(CallPage)) == 0) {
    path_ = str("/proc/", ::getpid(), "/fd/", fd_);
  }
  void* memory = ::mmap(nullptr, sizeof(CallPage), PROT_READ | PROT_WRITE, flags, fd_, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  page_ = new (memory) CallPage;
}

SharedPage::~SharedPage() {
  ::munmap(page_, sizeof(CallPage));
  if (fd_ >= 0) ::close(fd_);
}

std::shared_ptr<const CallPage> open_page(const std::string& path) {
  if (path.empty()) return nullptr;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat facts{};
  void* memory = MAP_FAILED;
  if (::fstat(fd, &facts) == 0 && facts.st_size == sizeof(CallPage)) {
    memory = ::mmap(nullptr, sizeof(CallPage), PROT_READ, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<const CallPage*>(memory),
          [memory](const CallPage*) { ::munmap(memory, sizeof(CallPage)); }};
}

}  // namespace accelerate::detail::comm
