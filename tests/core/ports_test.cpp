#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;

/// An IPv4 socket bound to a port of the system's choice on one interface.
class BoundSocket {
 public:
  explicit BoundSocket(in_addr_t interface) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(interface);
    socklen_t size = sizeof address_;
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address_), size), 0);
    EXPECT_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address_), &size), 0);
  }
  ~BoundSocket() { ::close(fd_); }
  void listen() const { ASSERT_EQ(::listen(fd_, 1), 0); }
  [[nodiscard]] int port() const { return ntohs(address_.sin_port); }

 private:
  int fd_;
  sockaddr_in address_{};
};

TEST(IsPortInUse, IsTrueWhileSomebodyListensOnTheLoopback) {
  BoundSocket server(INADDR_LOOPBACK);
  server.listen();
  EXPECT_TRUE(is_port_in_use(server.port()));
}

TEST(IsPortInUse, IsTrueForAPortThatIsBoundButNotListenedOn) {
  const BoundSocket holder(INADDR_ANY);
  EXPECT_TRUE(is_port_in_use(holder.port()));
}

TEST(IsPortInUse, IsFalseAfterThePortWasGivenBack) {
  int port = 0;
  {
    const ReservedPort reserved;
    port = reserved.port();
    EXPECT_TRUE(is_port_in_use(port));
  }
  EXPECT_FALSE(is_port_in_use(port));
}

TEST(IsPortInUse, RefusesANumberThatIsNoPort) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)is_port_in_use(70000); }),
            "70000 is not a port: ports are numbers from 0 to 65535.");
}

TEST(GetFreePort, ReturnsAPortThatCanBeReserved) {
  const int port = get_free_port();
  EXPECT_GT(port, 0);
  EXPECT_EQ(ReservedPort(port).port(), port);
}

TEST(ReservedPort, RefusesAPortThatIsTakenAndNamesIt) {
  const ReservedPort first;
  const auto port = std::to_string(first.port());
  EXPECT_EQ(
      message_of<ConfigError>([&] { ReservedPort second(first.port()); }),
      "Port " + port + " is in use on this host. Give another one, or 0 to let the system choose.");
}

TEST(ReservedPort, LetsClientsConnectBeforeAServerAccepts) {
  const ReservedPort reserved;
  const int client = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(reserved.port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ::close(client);
}

TEST(ReservedPort, MovesItsSocketAndClosesItOnce) {
  ReservedPort first;
  const int fd = first.fd();
  const int port = first.port();
  ReservedPort second(std::move(first));
  EXPECT_EQ(first.fd(),
            -1);  // NOLINT(bugprone-use-after-move): what a moved-from one says is asserted
  EXPECT_EQ(second.fd(), fd);
  EXPECT_EQ(second.port(), port);
}

TEST(ReservedPort, LeavesAReleasedSocketOpen) {
  int fd = -1;
  int port = 0;
  {
    ReservedPort reserved;
    port = reserved.port();
    fd = reserved.release();
    EXPECT_EQ(reserved.fd(), -1);
  }
  EXPECT_NE(::fcntl(fd, F_GETFD), -1);
  EXPECT_TRUE(is_port_in_use(port));
  ::close(fd);
}

}  // namespace
}  // namespace accelerate
