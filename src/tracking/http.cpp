#include "tracking/http.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <string_view>
#include <system_error>

#include "accelerate/errors.h"
#include "core/descriptor.h"
#include "core/numbers.h"
#include "core/percent.h"
#include "core/sockets.h"
#include "core/text.h"

namespace accelerate::detail::tracking {
namespace {

using Clock = std::chrono::steady_clock;

/// A connection on which all must be done by one point in time.
class Connection {
 public:
  Connection(const HttpServer& server, std::chrono::milliseconds limit)
      : server_(server), end_(Clock::now() + limit) {
    std::string error;
    auto socket = connect_to(server.host, server.port, limit, error);
    if (!socket) fail(error);
    socket_ = std::move(*socket);
  }

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto count = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count < 0) {
        wait_for(POLLOUT);
      } else {
        bytes.remove_prefix(static_cast<std::size_t>(count));
      }
    }
  }

  /// All that comes until the server closes the connection.
  [[nodiscard]] std::string receive() {
    constexpr std::size_t kLongestAnswer = 64 << 20;
    std::string answer;
    std::array<char, 65536> buffer{};
    while (true) {
      const auto count = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
      if (count == 0) return answer;
      if (count < 0) {
        wait_for(POLLIN);
        continue;
      }
      answer.append(buffer.data(), static_cast<std::size_t>(count));
      if (answer.size() > kLongestAnswer) fail("its answer does not end");
    }
  }

  [[noreturn]] void fail(const std::string& reason) const {
    throw ConfigError(str("No answer from http://", server_.host, ":", server_.port, server_.path,
                          ": ", reason, "."));
  }

 private:
  /// After a call that failed: waits if that was all that it needed.
  void wait_for(short events) const {
    if (errno == EINTR) return;
    if (errno != EAGAIN) fail(std::generic_category().message(errno));
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now());
    pollfd ready{.fd = socket_.get(), .events = events, .revents = 0};
    if (left.count() <= 0 || ::poll(&ready, 1, static_cast<int>(left.count())) == 0) {
      fail("it takes too long");
    }
  }

  const HttpServer& server_;
  Clock::time_point end_;
  Descriptor socket_;
};

}  // namespace

HttpServer HttpServer::parse(const std::string& address, const std::string& source) {
  if (address.starts_with("https://")) {
    throw UnsupportedError(str(source, " is '", without_login(address),
                               "', but this library speaks no TLS. Use http:// on a trusted "
                               "network or through a local proxy, or a folder (file://)."));
  }
  std::string rest = address.starts_with("http://") ? address.substr(7) : "";
  HttpServer server;
  if (const auto slash = rest.find('/'); slash != std::string::npos) {
    server.path = rest.substr(slash);
    rest.erase(slash);
    while (server.path.ends_with('/')) server.path.pop_back();
  }
  if (const auto at = rest.rfind('@'); at != std::string::npos) {
    server.login = percent_decoded(rest.substr(0, at));
    rest.erase(0, at + 1);
  }
  if (const auto colon = rest.rfind(':'); colon != std::string::npos && !rest.ends_with(']')) {
    server.port = parse_number<std::uint16_t>(rest.substr(colon + 1)).value_or(0);
    rest.erase(colon);
  }
  if (rest.starts_with('[') && rest.ends_with(']')) rest = rest.substr(1, rest.size() - 2);
  server.host = rest;
  if (server.host.empty() || server.port == 0) {
    throw ConfigError(str(source, " is '", without_login(address),
                          "', which is no address of a server. Expected http://HOST:PORT."));
  }
  return server;
}

// HTTP/1.0: the server closes the connection after its answer, and sends no chunks.
HttpResponse http_request(const HttpServer& server, const std::string& target,
                          const std::vector<std::string>& headers, const std::string& body,
                          std::chrono::milliseconds limit) {
  Connection connection(server, limit);
  const bool ipv6 = server.host.find(':') != std::string::npos;
  auto request = str(body.empty() ? "GET " : "POST ", server.path, target,
                     " HTTP/1.0\r\nHost: ", ipv6 ? "[" : "", server.host, ipv6 ? "]:" : ":",
                     server.port, "\r\n");
  for (const auto& header : headers) request += header + "\r\n";
  if (!body.empty()) request += str("Content-Length: ", body.size(), "\r\n");
  connection.send(request + "\r\n" + body);
  const auto answer = connection.receive();
  const auto head = answer.find("\r\n\r\n");
  if (!answer.starts_with("HTTP/1.") || head == std::string::npos) connection.fail("it is no HTTP");
  const auto status = parse_number<int>(answer.substr(9, 3));
  if (!status) connection.fail("its answer has no status");
  HttpResponse response{.status = *status, .body = answer.substr(head + 4)};
  for (const auto& line : split(to_lower(answer.substr(0, head)), '\n')) {
    constexpr std::string_view kLength = "content-length:";
    if (!line.starts_with(kLength)) continue;
    const auto size = parse_number<std::size_t>(trim(line.substr(kLength.size())));
    if (size > response.body.size()) connection.fail("its answer is cut off");
  }
  return response;
}

// Up to the last '@', wherever it is: a password may have any character.
std::string without_login(const std::string& address) {
  const auto scheme = address.find("://");
  const auto at = address.rfind('@');
  if (scheme == std::string::npos || at == std::string::npos || at < scheme) return address;
  return address.substr(0, scheme + 3) + address.substr(at + 1);
}

std::string percent_encoded(const std::string& text, std::string_view plain) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<std::uint8_t>(c);
    if ((byte < 0x80 && std::isalnum(byte) != 0) || plain.find(c) != std::string_view::npos) {
      out += c;
    } else {
      out += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out;
}

std::string base64_encoded(const std::string& bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    std::uint32_t group = 0;
    for (std::size_t i = at; i < at + 3; ++i) {
      group = group << 8 | (i < bytes.size() ? static_cast<std::uint8_t>(bytes[i]) : 0U);
    }
    for (int shift = 18; shift >= 0; shift -= 6) out += kDigits[group >> shift & 63];
  }
  const auto padding = (3 - bytes.size() % 3) % 3;
  return out.replace(out.size() - padding, padding, padding, '=');
}

}  // namespace accelerate::detail::tracking
