// Meeting where the host program can pass a text from rank 0 to all, by MPI for one.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/partial_state_options.h"
#include "core/text.h"
#include "core/world.h"
#include "state/process_group.h"

namespace accelerate::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr char kFailed = '!';

// Several networks may lead to a host, and not every name of it resolves everywhere: the first
// address that answers is taken.
c10::intrusive_ptr<c10d::Store> connect_to_any(const std::vector<std::string>& hosts, int port,
                                               milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (auto patience = milliseconds(500);; patience *= 2) {
    for (const auto& host : hosts) {
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      try {
        return connect_store(host, port, std::clamp(left, milliseconds(1), patience));
      } catch (const CommError&) {
        if (Clock::now() >= deadline) throw;
      }
    }
  }
}

// "port host host ...", or "!" and what went wrong.
std::string announce(const ServedStore& served, const ProcessPlace& place) {
  if (place.local_size == place.size) return str(served.port, " 127.0.0.1");
  std::vector<std::string> hosts = interface_addresses();
  hosts.insert(hosts.begin(), this_host_name());
  return str(served.port, " ", join(hosts, " "));
}

}  // namespace

PartialStateOptions meet_by_broadcast(PartialStateOptions options, const ProcessPlace& place,
                                      const std::function<std::string(std::string)>& broadcast) {
  const milliseconds timeout = options.timeout.value_or(std::chrono::minutes(30));
  options.rank = place.rank;
  options.world_size = place.size;
  options.local_rank = place.local_rank;
  options.local_world_size = place.local_size;
  if (place.rank == 0) {
    ServedStore served;
    try {
      served = serve_store(timeout);
    } catch (const std::exception& error) {
      (void)broadcast(kFailed + std::string(error.what()));
      throw CommError(
          str("rank 0 cannot serve the store at which the processes meet: ", error.what()), 0);
    }
    (void)broadcast(announce(served, place));
    options.store = served.store;
    return options;
  }
  const std::string text = broadcast("");
  if (text.empty() || text.front() == kFailed) {
    throw CommError(str("rank 0 cannot serve the store at which the processes meet: ",
                        text.substr(std::min<std::size_t>(1, text.size()))),
                    0);
  }
  auto hosts = split(text, ' ');
  const int port = std::stoi(hosts.front());
  hosts.erase(hosts.begin());
  options.store = connect_to_any(hosts, port, timeout);
  return options;
}

}  // namespace accelerate::detail
