#include "comm/message_exchange.h"

#include <stdexcept>
#include <utility>

#include "accelerate/errors.h"
#include "core/exception_text.h"

namespace accelerate::detail::comm {
namespace {

void abort_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (const auto& work : works) work->abort();
}

}  // namespace

std::uint32_t tag_of(const Ticket& ticket) {
  return static_cast<std::uint32_t>(ticket.sequence << 20) |
         static_cast<std::uint32_t>((ticket.signature ^ ticket.sequence * 0x9e3779b97f4a7c15ULL) >>
                                    44);
}

MessageExchange::MessageExchange(c10d::Backend& transport, std::shared_ptr<GroupGuard> guard)
    : transport_(transport), guard_(std::move(guard)) {}

MessageExchange::Works MessageExchange::start(int tag, const std::vector<PeerMessage>& arriving,
                                              const std::vector<PeerMessage>& leaving) {
  Works works;
  for (const auto& [peer, tensor] : arriving) {
    std::vector<at::Tensor> tensors{tensor};
    if (tensor.numel() > 0) works.push_back(transport_.recv(tensors, peer, tag));
  }
  for (const auto& [peer, tensor] : leaving) {
    std::vector<at::Tensor> tensors{tensor};
    if (tensor.numel() > 0) works.push_back(transport_.send(tensors, peer, tag));
  }
  return works;
}

void MessageExchange::exchange(const Ticket& ticket, const std::vector<PeerMessage>& arriving,
                               const std::vector<PeerMessage>& leaving,
                               std::chrono::milliseconds timeout) {
  // Tags of messages are positive.
  const int tag = static_cast<int>(tag_of(ticket) & 0x7fffffffU);
  try {
    const auto works = start(tag, arriving, leaving);
    guard_->on_failure(ticket, [works] { abort_all(works); });
    {
      const std::scoped_lock lock(mutex_);
      under_way_ = works;
      if (closed_) abort_all(works);
    }
    for (const auto& work : works) {
      if (!work->wait(timeout)) throw std::runtime_error("interrupted");
    }
    const std::scoped_lock lock(mutex_);
    under_way_.clear();
  } catch (const std::exception&) {
    const auto text = current_exception_text().message;
    {
      const std::scoped_lock lock(mutex_);
      under_way_.clear();
      if (closed_) throw CommError("the process group was destroyed");
    }
    std::rethrow_exception(guard_->explain(ticket, text));
  }
}

void MessageExchange::close() noexcept {
  const std::scoped_lock lock(mutex_);
  closed_ = true;
  abort_all(under_way_);
}

}  // namespace accelerate::detail::comm
