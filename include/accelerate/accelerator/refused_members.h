// accelerate/accelerator/refused_members.h - members of Python's `Accelerator` that are not
// available yet, or not in C++.
//
// Part of accelerate/accelerator.h. Each throws `UnsupportedError` that says why.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

#include "accelerate/api.h"

namespace accelerate {

namespace detail::accelerator {
/// Throws `UnsupportedError` that says why there is no such member, or when it comes.
[[noreturn]] ACCELERATE_API void refuse_member(const char* name);
}  // namespace detail::accelerator

class ACCELERATE_API RefusedMembers {
 public:
  [[noreturn]] void save_state(const std::filesystem::path& output_dir = {});
  [[noreturn]] void load_state(const std::filesystem::path& input_dir = {});
  [[noreturn]] void wait_for_save_state();
  template <class Hook>
  [[noreturn]] void register_save_state_pre_hook(const Hook&) {
    detail::accelerator::refuse_member("register_save_state_pre_hook");
  }
  template <class Hook>
  [[noreturn]] void register_load_state_pre_hook(const Hook&) {
    detail::accelerator::refuse_member("register_load_state_pre_hook");
  }
  template <class... Ts>
  [[noreturn]] void profile(const Ts&...) {
    detail::accelerator::refuse_member("profile");
  }
  template <class... Ts>
  [[noreturn]] void capture(const Ts&...) {
    detail::accelerator::refuse_member("capture");
  }
  [[noreturn]] void lomo_backward(const at::Tensor& loss, double learning_rate);

 protected:
  RefusedMembers() = default;
  ~RefusedMembers() = default;
};

}  // namespace accelerate
