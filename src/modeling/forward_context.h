// src/modeling/forward_context.h - what the forward of this thread runs in, beside autocast.
//
// Activation checkpoints keep it, and repeat a part of the forward in the same context.
#pragma once

#include <memory>
#include <utility>

#include "accelerate/api.h"

namespace accelerate::detail::modeling {

class ForwardContext {
 public:
  virtual ~ForwardContext() = default;
};

struct CurrentForwardContext {
  std::shared_ptr<const ForwardContext> context = nullptr;
  /// True while backward calls a part of the forward again.
  bool repeats = false;
};

/// Of this thread.
[[nodiscard]] ACCELERATE_API CurrentForwardContext& forward_context();

class ForwardContextScope {
 public:
  ForwardContextScope(std::shared_ptr<const ForwardContext> context, bool repeats)
      : before_(std::exchange(forward_context(), {std::move(context), repeats})) {}
  ~ForwardContextScope() { forward_context() = std::move(before_); }
  ForwardContextScope(const ForwardContextScope&) = delete;
  ForwardContextScope& operator=(const ForwardContextScope&) = delete;

 private:
  CurrentForwardContext before_;
};

}  // namespace accelerate::detail::modeling
