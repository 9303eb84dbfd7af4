// tests/resume/trace.h - what a training run says of each batch.
#pragma once

#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace accelerate::test {

inline std::uint64_t sum_of(const std::vector<torch::Tensor>& tensors) {
  std::uint64_t sum = 14695981039346656037U;
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.detach().cpu().contiguous();
    const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
    for (std::size_t i = 0; i < bytes.nbytes(); ++i) sum = (sum ^ data[i]) * 1099511628211U;
  }
  return sum;
}

/// Lines that appear whole, whenever the process is killed.
class Trace {
 public:
  explicit Trace(const std::string& path)
      : fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {}
  void write(const std::string& line) const {
    if (::write(fd_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
  }

 private:
  int fd_;
};

}  // namespace accelerate::test
