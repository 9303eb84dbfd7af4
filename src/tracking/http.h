// src/tracking/http.h - requests to a server without TLS.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace accelerate::detail::tracking {

/// Where "http://user:password@host:5000/path" leads.
struct HttpServer {
  std::string host;
  int port = 80;
  std::string path;   ///< without a '/' at its end
  std::string login;  ///< "user:password" without %XX, or empty

  /// Throws `ConfigError` with `source` and the address if it is none, `UnsupportedError` for
  /// https.
  [[nodiscard]] static HttpServer parse(const std::string& address, const std::string& source);
};

struct HttpResponse {
  int status = 0;
  std::string body;
};

/// One request on a connection of its own: a POST, or a GET if `body` is empty. `target` is
/// appended to the path of the server, `headers` are whole lines. Throws `ConfigError` that names
/// the server and the reason if there is no whole answer within `limit`.
[[nodiscard]] HttpResponse http_request(const HttpServer& server, const std::string& target,
                                        const std::vector<std::string>& headers,
                                        const std::string& body,
                                        std::chrono::milliseconds limit = std::chrono::seconds(5));

/// The address as messages show it: without user and password.
[[nodiscard]] std::string without_login(const std::string& address);
/// Every byte that is not a letter, digit or one of `plain` as %XX.
[[nodiscard]] std::string percent_encoded(const std::string& text, std::string_view plain = "-._~");
[[nodiscard]] std::string base64_encoded(const std::string& bytes);

}  // namespace accelerate::detail::tracking
