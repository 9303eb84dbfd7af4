// Rendezvous for a host program that can broadcast a text from rank 0, for example by MPI.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/state/partial_state_options.h"
#include "core/log.h"
#include "core/text.h"
#include "core/uncaught.h"
#include "core/world.h"
#include "state/countdown.h"
#include "state/process_group.h"

namespace accelerate::detail::state {
namespace {

using std::chrono::milliseconds;

constexpr char kFailed = '!';

// How long one of several addresses is tried before the next.
constexpr auto kOneHost = milliseconds(1000);

// Several networks may lead to a host, and not every name of it resolves everywhere: the first
// address that answers is taken.
c10::intrusive_ptr<c10d::Store> connect_to_any(const std::vector<std::string>& hosts, int port,
                                               int rank, milliseconds timeout) {
  for (Countdown countdown(timeout);;) {
    for (const auto& host : hosts) {
      try {
        return connect_store(host, port, std::clamp(countdown.left(), milliseconds(1), kOneHost));
      } catch (const CommError&) {
        if (countdown.over()) throw;
      }
    }
    if (countdown.notice_is_due()) {
      warn(str("rank ", rank, " does not reach rank 0 at port ", port, " of ", join(hosts, ", "),
               "; ", countdown.text()));
    }
  }
}

// "port host host ...", or "!" and the error.
std::string announce(const ServedStore& served, const ProcessPlace& place) {
  if (place.local_size == place.size) return str(served.port, " 127.0.0.1");
  std::vector<std::string> hosts = interface_addresses();
  hosts.insert(hosts.begin(), this_host_name());
  return str(served.port, " ", join(hosts, " "));
}

}  // namespace

PartialStateOptions meet_by_broadcast(PartialStateOptions options, const ProcessPlace& place,
                                      const std::function<std::string(std::string)>& broadcast) {
  handle_uncaught_exceptions();
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
  auto hosts = detail::split(text, ' ');
  const int port = std::stoi(hosts.front());
  hosts.erase(hosts.begin());
  options.store = connect_to_any(hosts, port, place.rank, timeout);
  return options;
}

}  // namespace accelerate::detail::state
