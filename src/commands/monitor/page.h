// src/commands/monitor/page.h - who may see the page of `accelerate monitor`, and what they get.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "commands/monitor/page_server.h"
#include "commands/monitor/runs.h"

namespace accelerate::detail::commands {

struct PageAccess {
  /// Required if it is not empty.
  std::string token = {};
  /// Names that a browser may call this server by: a page of another site that lets its name point
  /// here is refused. Empty: any, for those with the token.
  std::vector<std::string> hosts = {};
  /// The name of the cookie that holds the token.
  std::string cookie = "accelerate_monitor";
};

class MonitorPage {
 public:
  /// `runs` must outlive it.
  MonitorPage(RunSet& runs, PageAccess access) : runs_(runs), access_(std::move(access)) {}

  [[nodiscard]] PageReply answer(const PageRequest& request);

 private:
  [[nodiscard]] PageReply state(const PageRequest& request);
  [[nodiscard]] PageReply log(const PageRequest& request) const;

  RunSet& runs_;
  PageAccess access_;
};

/// 128 random bits as text.
[[nodiscard]] std::string new_token();

/// The files of the page, embedded by the build.
extern const std::string_view kPageHtml;
extern const std::string_view kPageScript;
extern const std::string_view kPageStyle;

}  // namespace accelerate::detail::commands
