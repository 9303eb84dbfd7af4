// src/launch/store_process.h - the workers' store in a process of its own, for programs whose rank
// 0 cannot serve it on an inherited socket.
#pragma once

#include <memory>
#include <string>

#include "core/subprocess.h"
#include "launch/channel.h"

namespace accelerate::detail::launch {

/// The path of `accelerate-torch`, beside this program or in PATH; "" if there is none.
[[nodiscard]] std::string find_torch_helper();

class StoreProcess {
 public:
  /// `socket`, on which the store will listen, must outlive this.
  explicit StoreProcess(const Descriptor& socket);

  /// True if `accelerate-torch` was found.
  [[nodiscard]] bool available() const noexcept { return !program_.empty(); }
  /// Starts an empty store.
  void start();
  void stop() noexcept { process_.reset(); }
  [[nodiscard]] bool running() const noexcept { return process_ != nullptr; }

 private:
  const Descriptor& socket_;
  std::string program_;
  std::unique_ptr<ProcessSet> process_;
};

}  // namespace accelerate::detail::launch
