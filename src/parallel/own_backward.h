// src/parallel/own_backward.h - tells the library's own backward passes from those of the program.
#pragma once

namespace accelerate::detail::parallel {

/// While it lives, a backward of this library is running.
class OwnBackward {
 public:
  OwnBackward() noexcept;
  ~OwnBackward();
  OwnBackward(const OwnBackward&) = delete;
  OwnBackward& operator=(const OwnBackward&) = delete;
};

/// True while an `OwnBackward` of any thread lives: autograd runs hooks on threads of its own.
[[nodiscard]] bool own_backward_runs() noexcept;

}  // namespace accelerate::detail::parallel
