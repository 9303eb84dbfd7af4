#include "commands/monitor/page_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

#include "core/percent.h"
#include "core/sockets.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kMostConnections = 64;
constexpr std::size_t kLongestHead = 8 << 10;
constexpr auto kTimeForRequest = std::chrono::seconds(5);
constexpr auto kTimeForReply = std::chrono::seconds(30);

/// "a=1&b=2" -> entries; the first of equal names counts.
std::map<std::string, std::string> entries_of(std::string_view text, char separator, bool encoded) {
  std::map<std::string, std::string> entries;
  for (const auto& part : split(text, separator)) {
    const auto entry = trim(part);
    const auto equal = entry.find('=');
    if (equal == entry.npos) continue;
    std::string value(entry.substr(equal + 1));
    if (encoded) {
      std::ranges::replace(value, '+', ' ');
      value = percent_decoded(value);
    }
    entries.try_emplace(std::string(entry.substr(0, equal)), std::move(value));
  }
  return entries;
}

PageReply refusal(int status, std::string text, std::vector<std::string> headers = {}) {
  return {.status = status, .body = std::move(text), .headers = std::move(headers)};
}

}  // namespace

std::string PageReply::bytes() const {
  std::string head = str("HTTP/1.1 ", status, " \r\nContent-Type: ", type,
                         "\r\nContent-Length: ", body.size(), "\r\n");
  head +=
      "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
      "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
      "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; "
      "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
      "frame-ancestors 'none'\r\n";
  for (const auto& line : headers) head += line + "\r\n";
  return head + "\r\n" + body;
}

std::variant<PageRequest, PageReply> parse_page_request(std::string_view head) {
  const auto lines = split(head, '\n');
  const auto words = split(trim(lines.front()), ' ');
  if (words.size() != 3 || !words[2].starts_with("HTTP/1.")) {
    return refusal(400, "This is no HTTP request.\n");
  }
  if (words[0] != "GET") return refusal(405, "Only GET is served.\n", {"Allow: GET"});
  PageRequest request;
  const auto& target = words[1];
  if (!target.starts_with('/')) return refusal(400, "The target must begin with '/'.\n");
  const auto question = target.find('?');
  request.path = target.substr(0, question);
  if (question != target.npos) {
    request.query = entries_of(std::string_view(target).substr(question + 1), '&', true);
  }
  for (const auto& line : lines) {
    const auto colon = line.find(':');
    if (colon == line.npos) continue;
    const auto name = to_lower(line.substr(0, colon));
    const auto value = trim(std::string_view(line).substr(colon + 1));
    if (name == "host") request.host = value;
    if (name == "cookie") request.cookies = entries_of(value, ';', false);
  }
  return request;
}

PageServer::PageServer(Descriptor listening, Handler handler)
    : listening_(std::move(listening)), handler_(std::move(handler)) {}

void PageServer::serve(std::chrono::milliseconds limit, int also) {
  const auto end = Clock::now() + limit;
  for (;;) {
    std::vector<pollfd> fds{{.fd = listening_.get(), .events = POLLIN, .revents = 0},
                            {.fd = also, .events = POLLIN, .revents = 0}};
    for (const auto& each : connections_) {
      const auto wants = static_cast<short>(each.output.empty() ? POLLIN : POLLOUT);
      fds.push_back({.fd = each.socket.get(), .events = wants, .revents = 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return;
    if (::poll(fds.data(), fds.size(), static_cast<int>(left.count())) < 0 && errno != EINTR) {
      return;
    }
    std::size_t at = 2;
    for (auto& each : connections_) {
      if (fds[at++].revents != 0) advance(each);
    }
    const auto now = Clock::now();
    connections_.remove_if([&](const auto& each) { return each.closed || each.until < now; });
    if (fds[0].revents != 0) accept_all();
    if (fds[1].revents != 0) return;
  }
}

void PageServer::accept_all() {
  while (auto accepted = accept_from(listening_)) {
    // The oldest gives way: it is the likeliest to be slow.
    if (connections_.size() == kMostConnections) connections_.pop_front();
    connections_.push_back(
        {.socket = std::move(accepted->first), .until = Clock::now() + kTimeForRequest});
  }
}

void PageServer::advance(Connection& connection) {
  if (connection.output.empty()) read_request(connection);
  while (!connection.output.empty() && !connection.closed) {
    const auto rest = std::string_view(connection.output).substr(connection.sent);
    if (rest.empty()) {
      connection.closed = true;
      return;
    }
    const auto count = ::send(connection.socket.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    connection.closed = count < 0;
    connection.sent += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
}

void PageServer::read_request(Connection& connection) {
  std::array<char, 4096> bytes;
  for (;;) {
    const auto count = ::recv(connection.socket.get(), bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) {
      connection.closed = true;
      return;
    }
    connection.input.append(bytes.data(), static_cast<std::size_t>(count));
    const auto end = connection.input.find("\r\n\r\n");
    if (end == std::string::npos && connection.input.size() < kLongestHead) continue;
    PageReply reply = refusal(431, "The request is too long.\n");
    if (end != std::string::npos) {
      auto parsed = parse_page_request(std::string_view(connection.input).substr(0, end));
      const auto* request = std::get_if<PageRequest>(&parsed);
      reply = request != nullptr ? handler_(*request) : std::get<PageReply>(std::move(parsed));
    }
    connection.output = reply.bytes();
    connection.until = Clock::now() + kTimeForReply;
    return;
  }
}

}  // namespace accelerate::detail::commands
