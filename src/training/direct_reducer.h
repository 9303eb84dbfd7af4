// src/training/direct_reducer.h - gradients averaged where they lie.
//
// c10d::Reducer copies each gradient into a bucket and back, so that one message carries many.
// Between processes that share memory a message costs next to nothing and the copies are most of
// the time: large gradients are averaged in place, and only small ones are put together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace accelerate::detail {

class DirectReducer {
 public:
  /// Whether messages of the group go through memory, and all tensors lie on the CPU. The same on
  /// all processes of a group.
  [[nodiscard]] static bool suits(const std::vector<at::Tensor>& parameters,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  /// The first message begins when gradients of `first_bytes` are there, later ones after
  /// `cap_bytes` each.
  DirectReducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                c10::intrusive_ptr<c10d::ProcessGroup> group, std::int64_t first_bytes,
                std::int64_t cap_bytes);
  ~DirectReducer();
  DirectReducer(const DirectReducer&) = delete;
  DirectReducer& operator=(const DirectReducer&) = delete;

  /// The next backward, which is collective, averages gradients.
  void arm();
  /// Waits for the messages. Throws `ArgumentError` that names a parameter to which no gradient
  /// came.
  void finish();

 private:
  /// What one message carries: small gradients one behind the other, and large ones.
  struct Bucket {
    std::vector<std::size_t> small;
    std::vector<std::size_t> large;
    at::Tensor together;  // of the small ones
    std::size_t missing = 0;
    std::vector<at::Tensor> sent;
    c10::intrusive_ptr<c10d::Work> work;
  };

  void arrived(std::size_t index, const at::Tensor& incoming);
  void send(Bucket& bucket);
  [[nodiscard]] bool is_ours_alone(std::size_t index) const;
  /// Calls `f(small gradient, its part of what is sent together)`.
  template <class F>
  void for_each_small(const Bucket& bucket, F&& f);

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;
  /// Kept alive for their hooks.
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooks_;

  std::mutex mutex_;  // gradients may come from several threads
  bool armed_ = false;
  std::vector<bool> is_there_;
  std::size_t next_ = 0;  // buckets are sent in one order everywhere
  at::Tensor incoming_;   // of the parameter whose hook runs
};

}  // namespace accelerate::detail
