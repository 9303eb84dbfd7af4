// src/commands/monitor/page_server.h - a small HTTP server: GET only, one request per connection.
//
// One thread, which never waits for a client: requests and replies have limits in size and time.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/descriptor.h"

namespace accelerate::detail::commands {

struct PageRequest {
  std::string path = {};
  std::map<std::string, std::string> query = {};
  /// Without blanks; "" if the header is not there.
  std::string host = {};
  std::map<std::string, std::string> cookies = {};
};

struct PageReply {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body = {};
  /// Whole lines, beside those that every reply has.
  std::vector<std::string> headers = {};

  /// As it is sent. Every reply forbids foreign scripts, frames, caches and guesses at its type.
  [[nodiscard]] std::string bytes() const;
};

/// The head of a request, up to its empty line; the reply that refuses it.
[[nodiscard]] std::variant<PageRequest, PageReply> parse_page_request(std::string_view head);

class PageServer {
 public:
  using Handler = std::function<PageReply(const PageRequest&)>;

  PageServer(Descriptor listening, Handler handler);

  /// Serves for `limit`, or until `also` is readable.
  void serve(std::chrono::milliseconds limit, int also = -1);

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    Descriptor socket;
    Clock::time_point until;
    std::string input = {};
    std::string output = {};
    std::size_t sent = 0;
    bool closed = false;
  };

  void accept_all();
  void advance(Connection& connection);
  void read_request(Connection& connection);

  Descriptor listening_;
  Handler handler_;
  std::list<Connection> connections_;
};

}  // namespace accelerate::detail::commands
