#include "state/pending_messages.h"

#include <atomic>

namespace accelerate::detail::state {
namespace {

std::atomic<SendPending> g_send_pending{nullptr};

}  // namespace

SendPending set_send_pending(SendPending send) noexcept { return g_send_pending.exchange(send); }

void send_pending() {
  if (const auto send = g_send_pending.load()) send();
}

}  // namespace accelerate::detail::state
