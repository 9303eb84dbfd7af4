// tests/tracking/http_server.h - a server that answers requests from a function.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/sockets.h"
#include "core/text.h"

namespace accelerate::test {

struct Request {
  std::string line;  ///< "POST /path HTTP/1.0"
  std::string head;
  std::string body;
};

/// Serves on loopback until its end.
class HttpServer {
 public:
  /// Returns the status line behind "HTTP/1.0 " and the body.
  using Handler = std::function<std::pair<std::string, std::string>(const Request&)>;

  explicit HttpServer(Handler handler, int port = 0) : handler_(std::move(handler)) {
    std::string error;
    socket_ = std::move(detail::listen_on(port, true, error).value());
    thread_ = std::thread([this] { serve(); });
  }
  ~HttpServer() {
    stop_ = true;
    thread_.join();
  }
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  [[nodiscard]] int port() const { return detail::port_of(socket_); }
  [[nodiscard]] std::vector<Request> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void serve() {
    while (!stop_) {
      pollfd ready{.fd = socket_.get(), .events = POLLIN, .revents = 0};
      if (::poll(&ready, 1, 10) != 1) continue;
      if (auto accepted = detail::accept_from(socket_)) answer(accepted->first);
    }
  }

  void answer(const detail::Descriptor& client) {
    std::string text;
    std::size_t size = std::string::npos;
    while (text.size() < size) {
      std::array<char, 4096> buffer{};
      const auto count = ::recv(client.get(), buffer.data(), buffer.size(), 0);
      if (count == 0) return;
      if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
      const auto end = text.find("\r\n\r\n");
      if (end == std::string::npos) continue;
      const auto length = text.find("Content-Length: ");
      size = end + 4 + (length < end ? std::stoul(text.substr(length + 16)) : 0);
    }
    const auto end = text.find("\r\n\r\n");
    const Request request{text.substr(0, text.find('\r')), text.substr(0, end),
                          text.substr(end + 4)};
    const auto [status, body] = handler_(request);
    const auto reply =
        detail::str("HTTP/1.0 ", status, "\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
    static_cast<void>(::send(client.get(), reply.data(), reply.size(), MSG_NOSIGNAL));
    const std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }

  Handler handler_;
  detail::Descriptor socket_;
  std::atomic<bool> stop_ = false;
  mutable std::mutex mutex_;
  std::vector<Request> requests_;
  std::thread thread_;
};

}  // namespace accelerate::test
