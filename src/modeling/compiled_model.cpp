#include "accelerate/modeling/compiled_model.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <utility>

#include "accelerate/errors.h"
#include "core/exception_text.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;
using Loader = torch::inductor::AOTIModelPackageLoader;

constexpr const char* kHowToMake =
    "Make one in Python: torch._inductor.aoti_compile_and_package(torch.export.export(model, "
    "inputs), package_path=..., inductor_configs={\"aot_inductor.link_libtorch\": False})";

}  // namespace

class CompiledModel::Impl {
 public:
  Impl(std::filesystem::path package, const CompiledModelOptions& options)
      : package_(std::move(package)) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(package_, error)) {
      throw CheckpointError(
          str("There is no compiled model '", package_.string(), "'. ", kHowToMake, "."), package_);
    }
    if (options.num_runners < 1) {
      throw ArgumentError(str("num_runners is ", options.num_runners, "; it must be 1 or more."));
    }
    try {
      loader_ = std::make_unique<Loader>(package_.string(), options.model_name,
                                         /*run_single_threaded=*/false,
                                         static_cast<std::size_t>(options.num_runners),
                                         static_cast<c10::DeviceIndex>(options.device_index));
    } catch (const std::exception&) {
      throw UnsupportedError(str("The compiled model '", package_.string(),
                                 "' cannot be loaded: ", detail::current_exception_text().message,
                                 ". It must be made with aot_inductor.link_libtorch off, by the "
                                 "version of PyTorch that this program "
                                 "runs with, for this kind of processor or GPU."));
    }
  }

  [[nodiscard]] std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    const at::NoGradGuard no_grad;
    try {
      return loader_->run(inputs);
    } catch (const std::exception&) {
      throw ArgumentError(str("The compiled model '", package_.string(), "' was called with ",
                              inputs.size(),
                              " tensors and failed: ", detail::current_exception_text().message,
                              ". Shapes and dtypes must be those that its export allows."));
    }
  }

  void load(const StateDict& state) {
    const at::NoGradGuard no_grad;
    std::unordered_map<std::string, at::Tensor> weights;
    std::vector<std::string> missing;
    for (const auto& name : loader_->get_constant_fqns()) {
      if (const auto* tensor = state.find(name)) {
        weights[name] = tensor->detach();
      } else {
        missing.push_back(name);
      }
    }
    if (!missing.empty()) {
      throw StateDictMismatch(
          str("The compiled model '", package_.string(),
              "' has weights that are not in the state: ", detail::join(missing), "."),
          package_);
    }
    try {
      loader_->load_constants(weights, /*use_inactive=*/false, /*check_full_update=*/true);
    } catch (const std::exception&) {
      throw StateDictMismatch(str("The weights do not fit the compiled model '", package_.string(),
                                  "': ", detail::current_exception_text().message),
                              package_);
    }
  }

  [[nodiscard]] Loader& loader() const { return *loader_; }

 private:
  std::filesystem::path package_;
  std::unique_ptr<Loader> loader_;
};

CompiledModel::CompiledModel(const std::filesystem::path& package,
                             const CompiledModelOptions& options)
    : impl_(std::make_unique<Impl>(package, options)) {}
CompiledModel::CompiledModel(const TorchDynamoPlugin& plugin, const CompiledModelOptions& options)
    : CompiledModel(detail::modeling::compiled_package(plugin), options) {}
CompiledModel::CompiledModel(CompiledModel&&) noexcept = default;
CompiledModel& CompiledModel::operator=(CompiledModel&&) noexcept = default;
CompiledModel::~CompiledModel() = default;

std::vector<at::Tensor> CompiledModel::operator()(const std::vector<at::Tensor>& inputs) const {
  return impl_->run(inputs);
}

std::vector<std::string> CompiledModel::constant_names() const {
  return impl_->loader().get_constant_fqns();
}

void CompiledModel::load_state_dict(const StateDict& state) { impl_->load(state); }

std::map<std::string, std::string> CompiledModel::metadata() const {
  const auto entries = impl_->loader().get_metadata();
  return {entries.begin(), entries.end()};
}

namespace detail::modeling {

std::filesystem::path compiled_package(const TorchDynamoPlugin& plugin) {
  if (plugin.options && plugin.options->is_dict()) {
    if (const auto* package = plugin.options->as_dict().get("aoti_package")) {
      return package->as_string();
    }
  }
  throw UnsupportedError(
      str("The dynamo backend INDUCTOR needs a compiled model: options of the TorchDynamoPlugin "
          "have no 'aoti_package'. ",
          kHowToMake, ", and name the file there."));
}

void refuse_compilation(const char* function) {
  throw UnsupportedError(
      str(function,
          " is not supported: LibTorch for C++ has no compiler of models. "
          "Accelerator::capture repeats a whole step from a recording; CompiledModel "
          "runs a model that Python has compiled."));
}

}  // namespace detail::modeling

}  // namespace accelerate
