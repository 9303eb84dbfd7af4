// src/pipeline/stage_messages.h - activations and gradients between the stages of a pipeline.
//
// Messages go through host memory: shared memory between processes of one host, Gloo otherwise.
// Sends do not wait for the receiver.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "accelerate/fwd.h"
#include "accelerate/parallel/pipeline_layers.h"

namespace accelerate::detail::pipeline {

/// What two stages know of tensors before they are sent.
struct TensorFacts {
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;
  std::vector<std::int64_t> sizes = {};

  bool operator==(const TensorFacts&) const = default;
};
using MessageFacts = std::vector<TensorFacts>;
[[nodiscard]] MessageFacts facts_of(const PipelineTensors& tensors);

/// A message from one rank of the pipeline to another. Both sides give the same `tag`.
struct MessageAddress {
  std::int64_t peer = 0;
  int tag = 0;
};

class StageMessages {
 public:
  using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

  /// `group` is null for a pipeline of one process.
  StageMessages(GroupHandle group, std::int64_t rank, c10::Device device)
      : group_(std::move(group)), rank_(rank), device_(device) {}

  /// Sends tensors of any shapes. Those of the first message with a tag and a `key` are said before
  /// it; later ones must have the same. Without a key they are said always. Throws `StateError` for
  /// other shapes.
  void send(const MessageAddress& to, const PipelineTensors& tensors,
            std::optional<std::uint64_t> key);
  /// Tensors on the device, without a graph; `requires_grad` is that of the sent ones.
  [[nodiscard]] PipelineTensors receive(const MessageAddress& from,
                                        std::optional<std::uint64_t> key);

  /// Tensors that the receiver knows the shapes of.
  void send_known(const MessageAddress& to, const PipelineTensors& tensors);
  [[nodiscard]] PipelineTensors receive_known(const MessageAddress& from,
                                              const MessageFacts& facts);

  /// Waits until all that was sent is out of our memory.
  void flush();
  /// Forgets messages of a step that an error has ended.
  void drop() noexcept;

  [[nodiscard]] std::int64_t bytes_sent() const { return bytes_sent_; }

 private:
  void post(const MessageAddress& to, const at::Tensor& tensor);
  void take(const MessageAddress& from, at::Tensor& tensor);

  GroupHandle group_;
  std::int64_t rank_;
  c10::Device device_;
  std::map<std::pair<int, std::uint64_t>, MessageFacts> sent_ = {};
  std::map<std::pair<int, std::uint64_t>, MessageFacts> received_ = {};
  /// Messages to this process, by tag.
  std::map<int, std::deque<PipelineTensors>> own_ = {};
  struct Pending {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor tensor;
  };
  std::deque<Pending> pending_ = {};
  std::int64_t bytes_sent_ = 0;
};

}  // namespace accelerate::detail::pipeline
