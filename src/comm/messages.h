// src/comm/messages.h - messages from rank to rank that make up a collective.
//
// Internal. They are sent and awaited on the thread of the caller: for little data that is faster
// than a collective of Gloo, which hands the work to a thread of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/group_guard.h"

namespace accelerate::detail {

/// By this number messages pair. It says what the call is, so that calls which do not fit together
/// never meet: no data moves between them.
[[nodiscard]] std::uint32_t tag_of(const Ticket& ticket);

struct Message {
  int peer = 0;
  at::Tensor tensor;  ///< dense; one without elements is not sent
};

class Messages {
 public:
  /// `transport` pairs messages by their tag and is used by nobody else, or for other tags.
  Messages(c10d::Backend& transport, std::shared_ptr<GroupGuard> guard);

  /// Sends and receives, all at once; returns when all have come and gone. By one thread at a time.
  /// Throws the verdict when the group fails meanwhile.
  void exchange(const Ticket& ticket, const std::vector<Message>& arriving,
                const std::vector<Message>& leaving,
                std::chrono::milliseconds timeout = kNoTimeout);

  /// Ends the exchange that is under way, and every later one, with `CommError`.
  void close() noexcept;

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  [[nodiscard]] Works start(int tag, const std::vector<Message>& arriving,
                            const std::vector<Message>& leaving);

  c10d::Backend& transport_;
  std::shared_ptr<GroupGuard> guard_;
  std::mutex mutex_;
  Works under_way_;
  bool closed_ = false;
};

}  // namespace accelerate::detail
