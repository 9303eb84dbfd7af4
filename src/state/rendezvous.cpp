// How processes find each other: one store that all of them can read and write.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/ports.h"
#include "core/process_variables.h"
#include "core/processes.h"
#include "core/sockets.h"
#include "core/text.h"
#include "state/countdown.h"
#include "state/process_group.h"
#include "state/roster.h"
#include "state/store_server.h"

namespace accelerate::detail::state {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kFile = "file://";
constexpr std::string_view kTcp = "tcp://";

// Longer than a connection takes on any working network.
constexpr auto kOneTry = milliseconds(5000);

struct Addresses {
  addrinfo* list = nullptr;
  ~Addresses() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

/// Looks a host up; 0, or the code that `gai_strerror` explains.
int resolve(const std::string& host, int port, int socket_type, Addresses& out) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = socket_type;
  return ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &out.list);
}

/// Selects one process of this host and job, while it lives: of many that wait for the same thing,
/// only one logs.
class Spokesman {
 public:
  explicit Spokesman(const std::string& what)
      : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    // An abstract name, which is free again when the process ends.
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    const auto text = str("accelerate/waits/", what);
    const auto length = std::min(text.size(), sizeof name.sun_path - 1);
    std::memcpy(name.sun_path + 1, text.data(), length);
    const auto size = offsetof(sockaddr_un, sun_path) + 1 + length;
    speaks_ = ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&name),
                     static_cast<socklen_t>(size)) == 0;
  }
  [[nodiscard]] bool speaks() const noexcept { return speaks_; }

 private:
  Descriptor socket_;
  bool speaks_ = false;
};

/// Waits until the store's server is up. c10d alone would retry once a second and write a line to
/// stderr for each try; most workers are there a few milliseconds before their rank 0.
void wait_for_server(const std::string& host, int port, Countdown countdown) {
  std::optional<Spokesman> spokesman;
  std::string why_not = "no reply";
  for (auto pause = milliseconds(2);; pause = std::min(pause * 2, milliseconds(200))) {
    if (connect_to(host, port, std::clamp(countdown.left(), pause, kOneTry), why_not)) return;
    if (countdown.left() <= pause) {
      throw CommError(
          str("no answer from ", host, ":", port, ", where the processes of this job meet (",
              why_not, "; tried for ", in_words(countdown.timeout()),
              "). Check that MASTER_ADDR and MASTER_PORT name the host of process 0, that process "
              "0 has started, and that no firewall is between."),
          0);
    }
    if (countdown.notice_is_due()) {
      if (!spokesman) spokesman.emplace(str(host, ":", port));
      if (spokesman->speaks()) {
        warn(str("no answer yet from ", host, ":", port, ", where rank 0 is expected (", why_not,
                 "); ", countdown.text()));
      }
    }
    std::this_thread::sleep_for(pause);
  }
}

c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& host,
                                              const c10d::TCPStoreOptions& options,
                                              const std::string& remark = "") {
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const c10::Error& error) {
    throw CommError(str(options.isServer ? "cannot open the port at which the processes meet, "
                                         : "cannot connect to ",
                        host, ":", options.port, ": ", error.what_without_backtrace(), remark),
                    0);
  }
}

/// Where a socket listens, as this host reaches it.
struct Listening {
  std::string host;
  int port = 0;
};

/// Returns nullopt and sets `why_not` if `fd` is not a listening TCP socket.
std::optional<Listening> listening_at(int fd, std::string& why_not) {
  int listens = 0;
  socklen_t length = sizeof listens;
  sockaddr_storage own = {};
  socklen_t own_length = sizeof own;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) != 0) {
    why_not = errno == ENOTSOCK ? "is not a socket" : "is not open";
    return std::nullopt;
  }
  const bool is_tcp = own.ss_family == AF_INET || own.ss_family == AF_INET6;
  if (listens == 0 || !is_tcp) {
    why_not = is_tcp ? "does not listen" : "is not a TCP socket";
    return std::nullopt;
  }
  char text[NI_MAXHOST] = {};
  ::getnameinfo(reinterpret_cast<sockaddr*>(&own), own_length, text, sizeof text, nullptr, 0,
                NI_NUMERICHOST);
  std::string host = text;
  if (host == "0.0.0.0") host = "127.0.0.1";  // any address of this host
  if (host == "::") host = "::1";
  const auto port = own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(own).sin_port
                                             : reinterpret_cast<sockaddr_in6&>(own).sin6_port;
  return Listening{std::move(host), ntohs(port)};
}

/// The socket that the launcher has bound to `port` for this process. Returns nullopt and sets
/// `why_not` if `number` does not name it.
std::optional<int> handed_socket(const std::string& number, int port, std::string& why_not) {
  if (number.empty()) return std::nullopt;
  int fd = -1;
  const auto* end = number.data() + number.size();
  const auto [stop, error] = std::from_chars(number.data(), end, fd);
  if (error != std::errc() || stop != end || fd < 0) {
    why_not = "is not a number";
    return std::nullopt;
  }
  const auto listening = listening_at(fd, why_not);
  if (!listening) return std::nullopt;
  if (listening->port == port) return fd;
  why_not = str("listens at port ", listening->port);
  return std::nullopt;
}

/// Lets a store serve until the process ends, like the group: see `default_group`.
void keep(c10::intrusive_ptr<c10d::TCPStore> store) {
  static auto* const kept = new std::vector<c10::intrusive_ptr<c10d::TCPStore>>;
  kept->push_back(std::move(store));
}

/// Serves the store at the socket of the launcher, or at a new one.
c10::intrusive_ptr<c10d::TCPStore> serve(const std::string& host, c10d::TCPStoreOptions options,
                                         const std::string& listen_fd) {
  std::string why_not;
  options.masterListenFd = handed_socket(listen_fd, options.port, why_not);
  if (!options.masterListenFd) {
    // A wrong number is no error as long as the port can be opened.
    return open_store(host, options,
                      why_not.empty() ? ""
                                      : str(" (", kListenFdVariable, " is '", listen_fd,
                                            "', which cannot be used instead: it ", why_not, ")"));
  }
  // Child processes must neither keep the port open nor see the number.
  ::fcntl(*options.masterListenFd, F_SETFD, FD_CLOEXEC);
  set_process_variable(kListenFdVariable, std::nullopt);
  auto store = open_store(host, options);
  // The socket cannot be bound again, so later worlds share its server.
  keep(store);
  return store;
}

c10::intrusive_ptr<c10d::Store> tcp_store(const Rendezvous& rendezvous, const std::string& address,
                                          const Countdown& countdown) {
  const auto colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) {
    throw ConfigError(str("init_method is 'tcp://", address,
                          "', which is not tcp://host:port. Example: tcp://10.0.0.1:29500."));
  }
  auto host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);  // [::1]:29500
  }
  const std::string_view digits = std::string_view(address).substr(colon + 1);
  int port = -1;
  const auto [stop, error] = std::from_chars(digits.begin(), digits.end(), port);
  const bool is_number = error == std::errc() && stop == digits.end();
  if (!is_number || port < 0 || port > 65535 || (port == 0 && rendezvous.world_size > 1)) {
    throw ConfigError(str("the port in '", address, "' must be a number from 1 to 65535."));
  }

  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = rendezvous.rank == 0 && !rendezvous.served_elsewhere;
  options.numWorkers = rendezvous.world_size;
  options.waitWorkers = false;  // the roster counts, which can name the missing ranks
  options.multiTenant = true;   // a second world of this process shares the server
  options.timeout = rendezvous.timeout;
  if (options.isServer) return serve(host, options, rendezvous.listen_fd);
  wait_for_server(host, port, countdown);
  return open_store(host, options);
}

/// Throws when another process claims to be this rank.
void claim_rank(c10d::Store& store, const Rendezvous& rendezvous) {
  if (store.add(str("claimed/", rendezvous.rank), 1) == 1) return;
  const bool by_file = rendezvous.init_method.starts_with(kFile);
  throw CommError(
      str("two processes say that they are rank ", rendezvous.rank, " of ", rendezvous.world_size,
          ". Give each process its own RANK (on several machines: its own --machine_rank).",
          by_file ? str(" Or ", rendezvous.init_method.substr(kFile.size()),
                        " is left from a run that was killed: remove it.")
                  : ""),
      rendezvous.rank);
}

/// Counts the worlds this process has joined, so that a second one meets under fresh names. All
/// processes create and leave worlds in the same order, so they agree on the number.
std::string fresh_prefix(int attempt) {
  static std::atomic<int> worlds{0};
  return str("accelerate/attempt_", attempt, "/world_", worlds++);
}

/// The files at which this process has met others: one store each, open until the program ends.
///
/// c10d removes such a file when as many stores have closed as there are processes; with a process
/// that leaves one world and enters the next it would do so while a slower one still needs it. So
/// this class counts: the last process removes the file.
class FileMeetings {
 public:
  c10::intrusive_ptr<c10d::Store> at(const std::string& path, int world_size) {
    const std::lock_guard lock(mutex_);
    auto& meeting = meetings_[path];
    if (!meeting.store) {
      meeting = {c10::make_intrusive<c10d::FileStore>(path, world_size), world_size};
    }
    return meeting.store;
  }

  ~FileMeetings() {
    for (auto& [path, meeting] : meetings_) {
      // A forked copy of this process was not counted.
      if (!owner_.is_forked_copy()) say_goodbye(path, meeting);
      // c10d's own count, in its destructor, would come to another result than ours.
      (void)meeting.store.release();
    }
  }

 private:
  struct Meeting;

  static void say_goodbye(const std::string& path, Meeting& meeting) noexcept {
    if (::access(path.c_str(), F_OK) != 0) return;  // gone already, and not to be made again
    try {
      // Do not wait for a file that is being removed; zero would mean no limit.
      meeting.store->setTimeout(milliseconds(1));
      if (meeting.store->add("accelerate/ended", 1) == meeting.world_size) ::unlink(path.c_str());
    } catch (...) {  // NOLINT(bugprone-empty-catch): the file, or its folder, went away
    }
  }

  struct Meeting {
    c10::intrusive_ptr<c10d::FileStore> store;
    int world_size = 0;
  };
  const OwnerProcess owner_;
  std::mutex mutex_;
  std::map<std::string, Meeting> meetings_;
};

c10::intrusive_ptr<c10d::Store> file_store(const std::string& path, int world_size) {
  static FileMeetings meetings;
  return meetings.at(path, world_size);
}

/// Returns the part of the store that belongs to this world, when all of its ranks are there.
c10::intrusive_ptr<c10d::Store> gather_at(const c10::intrusive_ptr<c10d::Store>& store,
                                          const Rendezvous& rendezvous,
                                          const Countdown& countdown) {
  auto own = c10::make_intrusive<c10d::PrefixStore>(fresh_prefix(rendezvous.attempt), store);
  own->setTimeout(rendezvous.timeout);
  try {
    claim_rank(*own, rendezvous);
  } catch (const c10::Error& error) {
    throw CommError(
        str("the store at which the processes meet went away: ", error.what_without_backtrace()),
        0);
  }
  Roster(own, rendezvous.rank, rendezvous.world_size, rendezvous.timeout).await_all(countdown);
  return own;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> meet_at(const c10::intrusive_ptr<c10d::Store>& store,
                                        const Rendezvous& rendezvous) {
  return gather_at(store, rendezvous, Countdown(rendezvous.timeout));
}

c10::intrusive_ptr<c10d::Store> meet(const Rendezvous& rendezvous) {
  const Countdown countdown(rendezvous.timeout);
  const std::string_view method = rendezvous.init_method;
  if (method.starts_with(kTcp)) {
    const std::string address(method.substr(kTcp.size()));
    return gather_at(tcp_store(rendezvous, address, countdown), rendezvous, countdown);
  }
  if (method.starts_with(kFile)) {
    const std::string path(method.substr(kFile.size()));
    return gather_at(file_store(path, rendezvous.world_size), rendezvous, countdown);
  }
  throw ConfigError(str("init_method is '", method,
                        "', which is not a way to meet. Use env://, tcp://host:port or "
                        "file:///path/on/a/shared/disk."));
}

std::optional<milliseconds>& meeting_timeout() {
  static std::optional<milliseconds> timeout;
  return timeout;
}

std::string address_towards(const std::string& master) {
  Addresses addresses;
  if (resolve(master, 9, SOCK_DGRAM, addresses) != 0) return "";
  for (const addrinfo* each = addresses.list; each != nullptr; each = each->ai_next) {
    // Connecting a datagram socket sends nothing: it only asks the kernel for the route.
    const int fd = ::socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC, each->ai_protocol);
    if (fd < 0) continue;
    sockaddr_storage own = {};
    socklen_t length = sizeof own;
    const bool routed = ::connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
                        ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0;
    ::close(fd);
    char text[NI_MAXHOST] = {};
    if (!routed || ::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text,
                                 nullptr, 0, NI_NUMERICHOST) != 0) {
      continue;
    }
    const std::string address = text;
    if (!address.starts_with("127.") && address != "::1") return address;
  }
  return "";
}

ServedStore serve_store(milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  auto store = open_store("127.0.0.1", options);
  const int port = store->getPort();
  return {std::move(store), port};
}

int hold_store(int listen_fd) {
  std::string why_not;
  const auto listening = listening_at(listen_fd, why_not);
  if (!listening) throw ConfigError(str("descriptor ", listen_fd, " ", why_not, "."));
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(listening->port);
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listen_fd;
  keep(open_store(listening->host, options));
  return listening->port;
}

c10::intrusive_ptr<c10d::Store> connect_store(const std::string& host, int port,
                                              milliseconds timeout) {
  wait_for_server(host, port, Countdown(timeout));
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return open_store(host, options);
}

}  // namespace accelerate::detail::state
