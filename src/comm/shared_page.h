// src/comm/shared_page.h - the page that holds a rank's last call, and how processes of the same
// host read it.
#pragma once

#include <memory>
#include <string>

#include "comm/call_log.h"

namespace accelerate::detail {

/// A page in memory that other processes can map. It has no name: nothing is left of it when the
/// last one ends.
class SharedPage {
 public:
  /// A new one; where the system refuses, memory of this process alone (`path` is empty).
  SharedPage();
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  [[nodiscard]] CallPage* get() const noexcept { return page_; }
  /// Where others open it, as long as this process lives.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  int fd_ = -1;
  CallPage* page_ = nullptr;
  std::string path_;
};

/// The page of another process of this host; nullptr where it cannot be reached.
[[nodiscard]] std::shared_ptr<const CallPage> open_page(const std::string& path);

}  // namespace accelerate::detail
