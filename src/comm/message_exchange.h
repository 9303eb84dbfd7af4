// src/comm/message_exchange.h - a collective made of messages from rank to rank.
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

namespace accelerate::detail::comm {

/// The number by which messages are paired. It contains the signature of the call, so that no data
/// moves between different calls.
[[nodiscard]] std::uint32_t tag_of(const Ticket& ticket);

struct PeerMessage {
  int peer = 0;
  at::Tensor tensor;  ///< dense; one without elements is not sent
};

class MessageExchange {
 public:
  /// `transport` pairs messages by their tag; other users of it use other tags.
  MessageExchange(c10d::Backend& transport, std::shared_ptr<GroupGuard> guard);

  /// Sends and receives all messages at once and waits for them. To be called by one thread at a
  /// time. Throws the verdict if the group fails meanwhile.
  void exchange(const Ticket& ticket, const std::vector<PeerMessage>& arriving,
                const std::vector<PeerMessage>& leaving,
                std::chrono::milliseconds timeout = kNoTimeout);

  /// Ends the running exchange, and every later one, with `CommError`.
  void close() noexcept;

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  [[nodiscard]] Works start(int tag, const std::vector<PeerMessage>& arriving,
                            const std::vector<PeerMessage>& leaving);

  c10d::Backend& transport_;
  std::shared_ptr<GroupGuard> guard_;
  std::mutex mutex_;
  Works under_way_;
  bool closed_ = false;
};

}  // namespace accelerate::detail::comm
