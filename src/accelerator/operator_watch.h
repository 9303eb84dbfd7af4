// src/accelerator/operator_watch.h - which operator of a recorded step cannot be recorded.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>

#include <atomic>
#include <string>

namespace accelerate::detail::accelerator {

/// Sees the operators of this thread, and of backward passes that it starts, while it lives. One at
/// a time in a process.
class OperatorWatch {
 public:
  explicit OperatorWatch(c10::Device device);
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

  /// Why the step cannot be recorded, for a message; empty if no operator is in the way.
  [[nodiscard]] std::string problem() const;
  /// The operator that began last, for example "aten::mm"; empty if there was none.
  [[nodiscard]] std::string last() const;

 private:
  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& call);
  static void ends(const at::RecordFunction& call, at::ObserverContext* context);
  void note(const char* name, const char* reason);

  c10::Device device_;
  at::CallbackHandle handle_;
  std::atomic<const char*> last_{nullptr};  // names of operators live as long as the process
  std::atomic<const char*> name_{nullptr};
  std::atomic<const char*> reason_{nullptr};
};

}  // namespace accelerate::detail::accelerator
