#include "commands/monitor/page.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <optional>

#include "accelerate/errors.h"
#include "commands/monitor/report.h"
#include "core/json.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::size_t kLogLines = 300;

/// Takes as long for a wrong text as for the right one.
bool same_secret(std::string_view given, std::string_view secret) {
  std::size_t difference = given.size() ^ secret.size();
  for (std::size_t i = 0; i < secret.size(); ++i) {
    difference |= static_cast<unsigned char>(secret[i] ^ (i < given.size() ? given[i] : '\0'));
  }
  return difference == 0;
}

/// "Localhost:6116" -> "localhost", "[::1]:6116" -> "[::1]".
std::string without_port(const std::string& host) {
  const auto colon = host.rfind(':');
  const bool port = colon != host.npos && is_digits(std::string_view(host).substr(colon + 1));
  return to_lower(port ? host.substr(0, colon) : host);
}

std::string text_in(const PageRequest& request, const std::string& name) {
  const auto found = request.query.find(name);
  return found != request.query.end() ? found->second : "";
}

PageReply forbidden(std::string text) { return {.status = 403, .body = std::move(text)}; }

ReportOptions options_of(const PageRequest& request) {
  ReportOptions options;
  if (request.query.contains("runs")) {
    options.runs.emplace();
    for (const auto& id : split(text_in(request, "runs"), ',')) {
      if (const auto number = parse_number<int>(id)) options.runs->push_back(*number);
    }
  }
  options.focus = parse_number<int>(text_in(request, "focus"));
  if (text_in(request, "axis") == "time") options.view.axis = Axis::kTime;
  const auto number = [&](const char* name) {
    return parse_number<double>(text_in(request, name)).value_or(0);
  };
  options.view.columns = static_cast<std::size_t>(
      std::clamp(parse_number<int>(text_in(request, "columns")).value_or(400), 10, 2000));
  options.view.from = number("from");
  options.view.to = number("to");
  return options;
}

}  // namespace

std::string new_token() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error("The system has no random numbers for a token.");
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string token;
  for (const auto byte : bytes) {
    token += kDigits[byte >> 4];
    token += kDigits[byte & 15];
  }
  return token;
}

PageReply MonitorPage::answer(const PageRequest& request) {
  if (!access_.hosts.empty() &&
      std::ranges::find(access_.hosts, without_port(request.host)) == access_.hosts.end()) {
    return forbidden(
        "This server is known by another name. Open the address that `accelerate monitor` has "
        "printed.\n");
  }
  if (!access_.token.empty()) {
    const auto cookie = request.cookies.find(access_.cookie);
    const bool known =
        cookie != request.cookies.end() && same_secret(cookie->second, access_.token);
    if (!known && !same_secret(text_in(request, "token"), access_.token)) {
      return forbidden(
          "The token is missing or wrong. Open the address that `accelerate monitor` has "
          "printed: it ends in ?token=...\n");
    }
    // The token leaves the address, which is shown, stored and sent around.
    if (request.path == "/" && request.query.contains("token")) {
      return {.status = 303,
              .headers = {"Location: /", str("Set-Cookie: ", access_.cookie, "=", access_.token,
                                             "; HttpOnly; SameSite=Lax; Path=/")}};
    }
  }
  if (request.path == "/")
    return {.type = "text/html; charset=utf-8", .body = std::string(kPageHtml)};
  if (request.path == "/page.js") {
    return {.type = "text/javascript; charset=utf-8", .body = std::string(kPageScript)};
  }
  if (request.path == "/page.css") {
    return {.type = "text/css; charset=utf-8", .body = std::string(kPageStyle)};
  }
  if (request.path == "/api/state") return state(request);
  if (request.path == "/api/log") return log(request);
  return {.status = 404, .body = "There is no such page.\n"};
}

PageReply MonitorPage::state(const PageRequest& request) {
  const double now = now_in_seconds();
  if (text_in(request, "version") == report_version(runs_, now)) return {.status = 304};
  return {.type = "application/json", .body = write_report(runs_, options_of(request), now)};
}

PageReply MonitorPage::log(const PageRequest& request) const {
  // Only the name of a file that was found: no path comes from outside.
  const auto name = text_in(request, "file");
  for (const auto& log : runs_.logs()) {
    if (log.lexically_relative(runs_.folder()).generic_string() != name) continue;
    Value::List lines;
    for (auto& line : RunSet::tail(log, kLogLines)) lines.emplace_back(std::move(line));
    return {
        .type = "application/json",
        .body = json_dumps(Value::Dict{{"lines", std::move(lines)}}, {.replace_invalid = true})};
  }
  return {.status = 404, .body = "There is no such log.\n"};
}

}  // namespace accelerate::detail::commands
