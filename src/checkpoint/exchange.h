// src/checkpoint/exchange.h - how the processes that write a checkpoint agree.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <source_location>
#include <stop_token>
#include <string>
#include <vector>

namespace accelerate::detail::checkpoint {

/// Collective. Calls the function on each process and returns what all of them gave, in rank order.
/// If one throws, all do: it the same exception, the others a `CommError` with its message.
using Exchange =
    std::function<std::vector<std::string>(const std::function<std::string()>& encode)>;

/// By a collective of the process group, which names a process that does not take part.
[[nodiscard]] Exchange exchange_by_collective(const char* operation, std::source_location where);

/// Through keys of the store that begin with `prefix`, so that it may run beside collectives of the
/// training thread. Throws `CommError` if `stop` is requested while it waits for others, or none of
/// them has answered for `timeout`.
struct StoreExchange {
  c10::intrusive_ptr<c10d::Store> store;
  std::string prefix;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout;
};
[[nodiscard]] Exchange exchange_by_store(const StoreExchange& where, std::stop_token stop);

}  // namespace accelerate::detail::checkpoint
