#include "sharding/swap_files.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "accelerate/errors.h"
#include "core/bytes.h"
#include "core/descriptor.h"
#include "core/text.h"

namespace accelerate::detail::sharding {
namespace {

/// Smaller tensors are not worth a file, of whole pages.
constexpr std::int64_t kSmall = 65536;

[[noreturn]] void refuse_folder(const std::filesystem::path& folder, int error) {
  throw ConfigError(str(
      "No file for offload to nvme can be made in '", folder.string(), "': ", std::strerror(error),
      ". Set nvme_path to a folder on the drive that this ", "process may write to."));
}

/// A file without a name.
Descriptor open_unnamed(const std::filesystem::path& folder) {
  if (Descriptor file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)); file) {
    return file;
  }
  if (errno != EOPNOTSUPP && errno != EISDIR) refuse_folder(folder, errno);
  auto name = (folder / "accelerate_swap_XXXXXX").string();
  Descriptor file(::mkostemp(name.data(), O_CLOEXEC));
  if (!file) refuse_folder(folder, errno);
  ::unlink(name.c_str());
  return file;
}

}  // namespace

struct SwapFiles::File {
  File(Descriptor opened, void* mapped, std::int64_t count)
      : descriptor(std::move(opened)), begin(mapped), bytes(count) {}
  ~File() { ::munmap(begin, static_cast<std::size_t>(bytes)); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] bool has(const void* address) const {
    const auto* const first = static_cast<const std::byte*>(begin);
    return address >= first && address < first + bytes;
  }

  Descriptor descriptor;
  void* begin;
  std::int64_t bytes;
};

SwapFiles::SwapFiles(std::filesystem::path folder) : folder_(std::move(folder)) {
  static_cast<void>(open_unnamed(folder_));  // an error now and not in the first step
}

SwapFiles::~SwapFiles() = default;

std::shared_ptr<SwapFiles::File> SwapFiles::make_file(std::int64_t bytes) const {
  auto file = open_unnamed(folder_);
  // Blocks are taken now: a full disk would be a SIGBUS in a later step.
  if (const int error = ::posix_fallocate(file.get(), 0, bytes); error != 0) {
    throw Error(str("Offload to nvme: '", folder_.string(), "' has no room for ",
                    convert_bytes(bytes), " more (", std::strerror(error),
                    "). This process has put ", convert_bytes(this->bytes()),
                    " there. Free some, name another folder, or offload to cpu."));
  }
  void* const begin = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                             MAP_SHARED, file.get(), 0);
  if (begin == MAP_FAILED) refuse_folder(folder_, errno);
  // Steps go through them from the first element to the last.
  static_cast<void>(::madvise(begin, static_cast<std::size_t>(bytes), MADV_SEQUENTIAL));
  return std::make_shared<File>(std::move(file), begin, bytes);
}

at::Tensor SwapFiles::place(const at::Tensor& tensor) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  if (bytes < kSmall) return tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  std::erase_if(files_, [](const auto& one) { return one.expired(); });
  const auto file = make_file(bytes);
  files_.push_back(file);
  auto placed = at::from_blob(
      file->begin, tensor.sizes(), [file](void*) {}, tensor.options().device(at::kCPU));
  placed.copy_(tensor.detach());
  return placed;
}

bool SwapFiles::holds(const at::Tensor& tensor) const {
  if (static_cast<std::int64_t>(tensor.nbytes()) < kSmall) return true;
  for (const auto& one : files_) {
    const auto file = one.lock();
    if (file && file->has(tensor.const_data_ptr())) return true;
  }
  return false;
}

void SwapFiles::release() {
  for (const auto& one : files_) {
    const auto file = one.lock();
    if (!file) continue;
    static_cast<void>(::sync_file_range(file->descriptor.get(), 0, 0, SYNC_FILE_RANGE_WRITE));
    static_cast<void>(::madvise(file->begin, static_cast<std::size_t>(file->bytes), MADV_DONTNEED));
  }
}

std::int64_t SwapFiles::bytes() const {
  std::int64_t sum = 0;
  for (const auto& one : files_) {
    if (const auto file = one.lock()) sum += file->bytes;
  }
  return sum;
}

}  // namespace accelerate::detail::sharding
