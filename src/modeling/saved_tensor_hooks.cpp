#include "modeling/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>
#include <utility>

#include "accelerate/errors.h"

namespace accelerate::detail::modeling {
namespace {

thread_local SavedTensorHooks* current = nullptr;

class HookedEngine final : public torch::autograd::Engine {
 public:
  static Engine& instance() {
    static HookedEngine engine;
    return engine;
  }
  HookedEngine(const HookedEngine&) = delete;
  HookedEngine& operator=(const HookedEngine&) = delete;

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current == nullptr ? nullptr : current->next();
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task,
      std::shared_ptr<torch::autograd::Node> root, torch::autograd::InputBuffer&& inputs) override {
    std::call_once(threads_started_, [this] {
      initialize_device_threads_pool();
      // That starts the threads of one engine in the life of a process: the one before this, if it
      // has run.
      if (!thread_pool_shared_) start_device_threads();
    });
    return Engine::execute_with_graph_task(task, std::move(root), std::move(inputs));
  }

 private:
  std::once_flag threads_started_;

  HookedEngine() = default;
  ~HookedEngine() override { stop(); }  // as its contract asks of every class that derives from it
};

}  // namespace

void install_saved_tensor_hooks() {
  using torch::autograd::Engine;
  const Engine* const installed = &Engine::get_default_engine();
  if (installed == &HookedEngine::instance()) return;
  if (installed != &Engine::get_base_engine()) {
    throw UnsupportedError(
        "activation_checkpoint: this process has an autograd engine that is not LibTorch's, as "
        "processes of Python have. Use torch.utils.checkpoint there, or call the function itself.");
  }
  torch::autograd::set_default_engine_stub(&HookedEngine::instance);
}

SavedTensorScope::SavedTensorScope(SavedTensorHooks& hooks)
    : before_(std::exchange(current, &hooks)) {}

SavedTensorScope::~SavedTensorScope() { current = before_; }

}  // namespace accelerate::detail::modeling
