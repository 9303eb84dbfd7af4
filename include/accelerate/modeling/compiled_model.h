// accelerate/modeling/compiled_model.h - models that Python has compiled ahead of time.
//
//     # Python: one package for all devices of a kind
//     exported = torch.export.export(model, (example,))
//     torch._inductor.aoti_compile_and_package(exported, package_path="model.pt2",
//         inductor_configs={"aot_inductor.link_libtorch": False})  # the program brings its own
//
//     // C++: no Python, no compiler
//     CompiledModel model("model.pt2");
//     const auto logits = model({x})[0];
//
// Included by accelerate/accelerate.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/plugins.h"
#include "accelerate/state_dict.h"

namespace accelerate {

struct CompiledModelOptions {
  /// The model in the package.
  std::string model_name = "model";
  /// Calls that may run at once, from several threads.
  std::int64_t num_runners = 1;
  /// The GPU, for a package that was made for one. -1: that of the process.
  std::int64_t device_index = -1;
};

/// A model from a package of AOTInductor. It computes results, and no gradients.
class ACCELERATE_API CompiledModel {
 public:
  /// Throws `CheckpointError` for a file that is not there, `UnsupportedError` for one that this
  /// LibTorch, or this machine, cannot run.
  explicit CompiledModel(const std::filesystem::path& package,
                         const CompiledModelOptions& options = {});
  /// The package that `options["aoti_package"]` of the plugin names. Throws `UnsupportedError` if
  /// there is none.
  explicit CompiledModel(const TorchDynamoPlugin& plugin, const CompiledModelOptions& options = {});
  CompiledModel(CompiledModel&&) noexcept;
  CompiledModel& operator=(CompiledModel&&) noexcept;
  ~CompiledModel();

  /// The results of the exported forward, flat. The inputs are the tensors of its arguments, in
  /// order, with shapes and dtypes that the export allows. Throws `ArgumentError` for others.
  [[nodiscard]] std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs) const;

  /// Names of the weights in the package, as the exported module had them.
  [[nodiscard]] std::vector<std::string> constant_names() const;
  /// Replaces weights by those of the same names, for example of the model in training. Throws
  /// `StateDictMismatch` that lists weights of the package that are not in `state`, or have another
  /// shape; others in `state` are passed over.
  void load_state_dict(const StateDict& state);
  /// What the compiler has noted: the device, its version, flags.
  [[nodiscard]] std::map<std::string, std::string> metadata() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail::modeling {
/// `options["aoti_package"]`. Throws `UnsupportedError` if it is not there.
[[nodiscard]] std::filesystem::path compiled_package(const TorchDynamoPlugin& plugin);
[[noreturn]] ACCELERATE_API void refuse_compilation(const char* function);
}  // namespace detail::modeling

/// Python compiles each repeated block of a model. Throws `UnsupportedError`: there is no compiler
/// here. `Accelerator::capture` removes the same overhead of a step, `CompiledModel` runs what
/// Python has compiled.
template <class Model>
[[noreturn]] void compile_regions(const Model&) {
  detail::modeling::refuse_compilation("compile_regions");
}
template <class Model>
[[noreturn]] void compile_regions_deepspeed(const Model&) {
  detail::modeling::refuse_compilation("compile_regions_deepspeed");
}

}  // namespace accelerate
