// src/comm/shared_page.h - the page that holds a rank's last call, and how processes of the same
// host read it.
#pragma once

#include <memory>
#include <string>

#include "comm/call_log.h"

namespace accelerate::detail::comm {

/// A page in memory that other processes can map. It has no name in a file system, so nothing is
/// left when the last process ends.
class SharedPage {
 public:
  /// Makes a page; if the system refuses, in memory of this process alone (`path` is empty).
  SharedPage();
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  [[nodiscard]] CallPage* get() const noexcept { return page_; }
  /// The path that other processes open while this process lives.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  int fd_ = -1;
  CallPage* page_ = nullptr;
  std::string path_;
};

/// The page of another process of this host; nullptr if it cannot be opened.
[[nodiscard]] std::shared_ptr<const CallPage> open_page(const std::string& path);

}  // namespace accelerate::detail::comm
