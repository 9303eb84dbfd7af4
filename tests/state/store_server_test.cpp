// `accelerate-torch store`, as the launcher uses it.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/subprocess.h"
#include "support/listening_socket.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using detail::ProcessSet;
using test::ListeningSocket;

// What the launcher of another job says when it meets a port that is taken.
constexpr const char* kHello = "ACCELERATE-LAUNCH 1 {\"run_id\": \"none\"}\n";

std::string command() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "../bin/accelerate-torch")
      .lexically_normal()
      .string();
}

// The exit code and what was written.
std::pair<int, std::string> run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), command());
  std::string output;
  ProcessSet processes([&](std::size_t, ProcessSet::Stream, std::string_view line) {
    output.append(line).append("\n");
  });
  processes.spawn({.argv = arguments,
                   .output = detail::StreamTarget::kPipe,
                   .error = detail::StreamTarget::kWithOutput});
  EXPECT_TRUE(processes.wait_all(Clock::now() + 60s));
  return {processes.status(0).code, output};
}

c10::intrusive_ptr<c10d::TCPStore> client(const std::string& host, int port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = 60s;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

class StoreServer {
 public:
  explicit StoreServer(const ListeningSocket& socket, std::vector<std::string> more = {}) {
    std::vector<std::string> argv = {command(), "store", "--listen-fd",
                                     std::to_string(socket.fd())};
    argv.insert(argv.end(), more.begin(), more.end());
    // c10d writes a stack for every client that it does not understand.
    processes_.spawn(
        {.argv = argv, .error = detail::StreamTarget::kNull, .inherit = {socket.fd()}});
  }

  [[nodiscard]] pid_t pid() const { return processes_.pid(0); }
  [[nodiscard]] bool ends_within(std::chrono::seconds time) {
    return processes_.wait_all(Clock::now() + time);
  }

 private:
  ProcessSet processes_;
};

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

// A connection that speaks another language.
class RawClient {
 public:
  explicit RawClient(int port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    const timeval limit = {.tv_sec = 20, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  ~RawClient() { ::close(fd_); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  void say(const std::string& text) const { ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  void finish() const { ::shutdown(fd_, SHUT_WR); }
  [[nodiscard]] bool is_hung_up_on() const {
    char byte = 0;
    const auto count = ::recv(fd_, &byte, 1, 0);
    return count == 0 || (count < 0 && errno == ECONNRESET);
  }

 private:
  int fd_;
};

bool is_gone(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);  // an iterator would throw when the process goes meanwhile
  return stat.empty() || stat.find(") Z ") != std::string::npos;
}

TEST(StoreServer, ServesAStoreOnTheSocketItIsGiven) {
  const ListeningSocket socket;
  const StoreServer server(socket);
  const auto one = client("127.0.0.1", socket.port());
  const auto other = client("127.0.0.1", socket.port());
  one->set("key", bytes("value"));
  EXPECT_EQ(other->get("key"), bytes("value"));
  EXPECT_EQ(one->add("count", 2), 2);
  EXPECT_EQ(other->add("count", 3), 5);
}

TEST(StoreServer, TakesAnIpv6Socket) {
  if (!ListeningSocket::has_ipv6()) GTEST_SKIP() << "this machine has no IPv6";
  const ListeningSocket socket(AF_INET6);
  const StoreServer server(socket);
  client("::1", socket.port())->set("key", bytes("value"));
}

TEST(StoreServer, LetsClientsWaitThatCameFirst) {
  const ListeningSocket socket;
  std::thread worker([&] {
    const auto store = client("127.0.0.1", socket.port());
    store->set("key", bytes("value"));
    EXPECT_EQ(store->get("key"), bytes("value"));
  });
  std::this_thread::sleep_for(200ms);
  const StoreServer server(socket);
  worker.join();
}

TEST(StoreServer, GoesOnWhenAClientSpeaksAnotherLanguage) {
  const ListeningSocket socket;
  const StoreServer server(socket);
  const auto store = client("127.0.0.1", socket.port());
  store->set("key", bytes("value"));
  {
    const RawClient launcher(socket.port());
    launcher.say(kHello);
    launcher.finish();
    EXPECT_TRUE(launcher.is_hung_up_on());
  }
  for (const auto& garbage :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(5, '\0'), std::string(100'000, '\3'),
        std::string("\0\xce\xf7\x85\x3c\x01\xff\xff\xff\xff\xff\xff\xff\xff", 14)}) {
    const RawClient stranger(socket.port());
    stranger.say(garbage);
    stranger.finish();
    EXPECT_TRUE(stranger.is_hung_up_on());
  }
  const RawClient silent(socket.port());
  EXPECT_EQ(store->get("key"), bytes("value"));
  EXPECT_EQ(client("127.0.0.1", socket.port())->get("key"), bytes("value"));
}

TEST(StoreServer, EndsWithTheProcessThatStartedIt) {
  const ListeningSocket socket;
  pid_t server = 0;
  ProcessSet processes([&](std::size_t, ProcessSet::Stream, std::string_view line) {
    server = static_cast<pid_t>(std::stoi(std::string(line)));
  });
  processes.spawn({.argv = {"sh", "-c",
                            command() + " store --listen-fd " + std::to_string(socket.fd()) +
                                " & echo $!; wait"},
                   .output = detail::StreamTarget::kPipe,
                   .inherit = {socket.fd()}});
  const auto deadline = Clock::now() + 60s;
  while (server == 0 && Clock::now() < deadline) {
    static_cast<void>(processes.wait(Clock::now() + 50ms));
  }
  ASSERT_NE(server, 0);
  // It serves, so it has asked for the signal.
  client("127.0.0.1", socket.port())->set("key", bytes("value"));
  ASSERT_FALSE(is_gone(server));
  ::kill(processes.pid(0), SIGKILL);  // the shell alone, not its group
  while (!is_gone(server) && Clock::now() < deadline) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(is_gone(server));
}

TEST(StoreServer, OutlivesTheKeysOfATerminalAndEndsBySigterm) {
  const ListeningSocket socket;
  StoreServer server(socket);
  const auto store = client("127.0.0.1", socket.port());
  store->set("key", bytes("value"));
  ::kill(server.pid(), SIGINT);
  ::kill(server.pid(), SIGHUP);
  EXPECT_EQ(store->get("key"), bytes("value"));
  ::kill(server.pid(), SIGTERM);
  EXPECT_TRUE(server.ends_within(20s));
}

TEST(StoreServer, EndsAfterItsTime) {
  const ListeningSocket socket;
  StoreServer server(socket, {"--timeout=1"});
  EXPECT_TRUE(server.ends_within(20s));
}

TEST(AccelerateTorch, ExplainsItself) {
  const auto [code, output] = run({"--help"});
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(output.starts_with("usage: accelerate-torch store --listen-fd N [--timeout S]\n"));
}

TEST(AccelerateTorch, TellsTheVersionsItRunsWith) {
  const auto [code, output] = run({"versions"});
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(output.starts_with("{\"torch\": \"2.")) << output;
  EXPECT_NE(output.find("\"path\": \"/"), std::string::npos) << output;
  EXPECT_TRUE(output.ends_with("}\n")) << output;
}

TEST(AccelerateTorch, RefusesWrongUse) {
  const std::string usage =
      "usage: accelerate-torch store --listen-fd N [--timeout S]\n"
      "       accelerate-torch self-test\n"
      "       accelerate-torch versions\n";
  const auto refusal = [&](const std::vector<std::string>& arguments) {
    const auto [code, output] = run(arguments);
    EXPECT_EQ(code, 2);
    EXPECT_TRUE(output.starts_with("accelerate-torch: ") && output.ends_with(usage)) << output;
    const auto prefix = std::string("accelerate-torch: ").size();
    return output.substr(prefix, output.find('\n') - prefix);
  };
  EXPECT_EQ(refusal({}), "a command is missing.");
  EXPECT_EQ(refusal({"serve"}), "'serve' is not a command. There are: store, self-test, versions.");
  EXPECT_EQ(refusal({"store"}), "store needs --listen-fd, the socket to serve.");
  EXPECT_EQ(refusal({"store", "--listen-fd"}), "--listen-fd needs a number.");
  EXPECT_EQ(refusal({"store", "--listen-fd", "x"}),
            "--listen-fd is 'x', which is not a number from 0 on.");
  EXPECT_EQ(refusal({"store", "--port=1"}), "store takes no '--port=1'.");
  EXPECT_EQ(refusal({"store", "--listen-fd=7777"}), "descriptor 7777 is not open.");
  EXPECT_EQ(refusal({"store", "--listen-fd=1"}), "descriptor 1 is not a socket.");
}

}  // namespace
}  // namespace accelerate
