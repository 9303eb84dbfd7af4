// A function whose saved tensors are placeholders, which the first of them that backward asks for
// fills all at once, by calling the function again.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <random>

#include "accelerate/errors.h"
#include "accelerate/nn/activation_checkpoint.h"
#include "accelerate/precision/autocast.h"
#include "accelerate/random.h"
#include "core/text.h"
#include "modeling/saved_tensor_hooks.h"
#include "modeling/torch_dtype.h"
#include "state/accelerator_backend.h"
#include "state/attention_rule.h"

namespace accelerate::detail::modeling {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// -- what the result of a function depends on, besides its inputs ---------------------------------

/// The states of Torch's default generators and of this library's.
class RandomStates {
 public:
  explicit RandomStates(std::vector<at::Generator> generators)
      : generators_(std::move(generators)), host_(host_rng()), numpy_(numpy_rng()) {
    for (const auto& one : generators_) {
      states_.push_back(get_rng_state(RNGType::kGenerator, one));
    }
  }
  void restore() const {
    for (std::size_t i = 0; i < generators_.size(); ++i) {
      set_rng_state(RNGType::kGenerator, states_[i], generators_[i]);
    }
    host_rng() = host_;
    numpy_rng() = numpy_;
  }
  [[nodiscard]] const std::vector<at::Generator>& generators() const { return generators_; }

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_ = {};
  std::mt19937 host_, numpy_;
};

/// While it lives, random numbers are those after `states`.
class RandomScope {
 public:
  explicit RandomScope(const RandomStates& states) : before_(states.generators()) {
    states.restore();
  }
  ~RandomScope() { before_.restore(); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomStates before_;
};

std::vector<at::Generator> generators_for(std::span<const at::Tensor> inputs) {
  std::vector<c10::Device> devices{c10::Device(c10::kCPU)};
  const auto add = [&](c10::Device device) {
    if (device.is_cpu() || device.is_meta()) return;
    if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
  };
  for (const auto& input : inputs) add(input.device());
  if (const auto* backend = state::accelerator_backend();
      backend != nullptr && backend->context_exists()) {
    add(c10::Device(backend->type(), static_cast<c10::DeviceIndex>(backend->current_device())));
  }
  std::vector<at::Generator> generators;
  for (const auto device : devices) {
    generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

/// The settings of autocast for one type of device.
struct AutocastSettings {
  explicit AutocastSettings(c10::DeviceType type)
      : device_type(type),
        dtype(at::autocast::get_autocast_dtype(type)),
        kwargs{.enabled = at::autocast::is_autocast_enabled(type),
               .cache_enabled = at::autocast::is_autocast_cache_enabled()} {}

  c10::DeviceType device_type;
  at::ScalarType dtype;
  AutocastKwargs kwargs;
};

// -- a checkpointed call --------------------------------------------------------------------------

/// Thrown out of a function when all its tensors are there. Not a std::exception, so that the
/// function does not take it for an error.
struct AllRepeated {};

/// What was saved, without its values.
struct SavedTensor {
  explicit SavedTensor(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()), device(tensor.device()) {
    if (!tensor.is_nested()) sizes = tensor.sizes();  // which has no sizes as a whole
  }
  bool operator==(const SavedTensor&) const = default;

  c10::DimVector sizes = {};
  at::ScalarType dtype;
  c10::Device device;
};

std::string shown(const SavedTensor& tensor) {
  return detail::str(name_of(tensor.dtype), c10::IntArrayRef(tensor.sizes), " on ",
                     tensor.device.str());
}

class Call : public std::enable_shared_from_this<Call> {
 public:
  Call(const ActivationCheckpointOptions& options, std::span<const at::Tensor> inputs,
       const std::type_info& function, CheckpointScope::Repeat repeat)
      : options_(options), function_(function), repeat_(std::move(repeat)) {
    if (options.preserve_rng_state) random_.emplace(generators_for(inputs));
    if (const auto* backend = state::accelerator_backend()) on_device_.emplace(backend->type());
    // Under the hooks of an outer checkpoint, if there is one: then it computes them again.
    for (const auto& input : inputs) {
      inputs_.emplace_back(input, /*is_output=*/false);
      trained_.push_back(input.requires_grad());
    }
  }

  /// In forward: the place of a tensor among all.
  std::size_t add(const at::Tensor& tensor) {
    saved_.emplace_back(tensor);
    return saved_.size() - 1;
  }
  void complete() { complete_ = true; }

  /// In backward: the tensor at a place. Another backward of the same graph repeats the call again,
  /// since parameters may have changed.
  at::Tensor take(std::size_t place) {
    const std::lock_guard lock(mutex_);
    const int task = torch::autograd::get_current_graph_task_id();
    if (task < 0 || task != task_ || !repeated_.at(place).tensor.defined()) repeat(task);
    auto [tensor, version] = std::exchange(repeated_[place], {});
    if (tensor._version() != version) {
      throw ArgumentError(str(name(),
                              " changes a tensor in place that it needs in backward: number ",
                              place + 1, " of the ", saved_.size(), " that it saves, ",
                              shown(saved_[place]), ". Use the operator that is not in place."));
    }
    return std::move(tensor);
  }

 private:
  struct Repeated {
    at::Tensor tensor = {};
    std::int64_t version = 0;
  };
  class Kept;
  class Repetition;

  void repeat(int task);
  void keep(const at::Tensor& tensor);
  [[nodiscard]] std::vector<at::Tensor> inputs() const;
  [[nodiscard]] std::string name() const {
    return str("activation_checkpoint: ", c10::demangle(function_.name()));
  }

  ActivationCheckpointOptions options_;
  const std::type_info& function_;
  CheckpointScope::Repeat repeat_;
  std::vector<SavedVariable> inputs_ = {};
  std::vector<bool> trained_ = {};
  std::optional<RandomStates> random_ = std::nullopt;
  AutocastSettings on_cpu_{c10::kCPU};
  std::optional<AutocastSettings> on_device_ = std::nullopt;
  state::AttentionRulePtr attention_ = state::attention_rule();
  std::vector<SavedTensor> saved_ = {};
  /// False while the forward runs, which may have a backward of its own inside.
  bool complete_ = false;

  std::mutex mutex_ = {};  // for what follows: backward has a thread for each device
  std::vector<Repeated> repeated_ = {};
  int task_ = -1;
};

/// What autograd has of a tensor that was saved in forward.
class Placeholder final : public SavedVariableHooks {
 public:
  explicit Placeholder(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  void call_pack_hook(const at::Tensor& tensor) override { place_ = call_->add(tensor); }
  at::Tensor call_unpack_hook() override { return call_->take(place_); }

 private:
  std::shared_ptr<Call> call_;
  std::size_t place_ = 0;
};

/// What it has of one that is saved again: the tensor, for a backward inside of the function.
class Call::Kept final : public SavedVariableHooks {
 public:
  explicit Kept(Call& call) : call_(call) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();  // the tensor itself may lead to the node that holds this
    call_.keep(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Call& call_;
  at::Tensor tensor_ = {};
};

class Call::Repetition final : public SavedTensorHooks {
 public:
  explicit Repetition(Call& call) : call_(call) {}
  std::unique_ptr<SavedVariableHooks> next() override { return std::make_unique<Kept>(call_); }

 private:
  Call& call_;
};

void Call::keep(const at::Tensor& tensor) {
  const auto place = repeated_.size();
  if (place < saved_.size() && saved_[place] != SavedTensor(tensor)) {
    throw ArgumentError(
        str(name(), " computed something else when backward called it again: tensor ", place + 1,
            " of the ", saved_.size(), " that it saves was ", shown(saved_[place]),
            " in forward and is ", shown(SavedTensor(tensor)),
            " now. It may depend on its inputs, on what it owns and on random numbers of Torch "
            "only, and not on what changes between forward and backward."));
  }
  repeated_.push_back({.tensor = tensor, .version = tensor._version()});
  if (options_.early_stop && complete_ && repeated_.size() == saved_.size()) throw AllRepeated();
}

std::vector<at::Tensor> Call::inputs() const {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    try {
      tensors.push_back(inputs_[i].unpack().detach().requires_grad_(trained_[i]));
    } catch (const c10::Error& error) {
      throw ArgumentError(
          str(name(), ": tensor ", i + 1, " of its ", inputs_.size(),
              " inputs cannot be used again in backward: ", error.what_without_backtrace()));
    }
  }
  return tensors;
}

void Call::repeat(int task) {
  task_ = -1;
  repeated_.clear();
  const auto tensors = inputs();
  {
    std::optional<RandomScope> random;
    if (random_) random.emplace(*random_);
    const AutocastScope on_cpu(on_cpu_.device_type, on_cpu_.dtype, on_cpu_.kwargs);
    std::optional<AutocastScope> on_device;
    if (on_device_)
      on_device.emplace(on_device_->device_type, on_device_->dtype, on_device_->kwargs);
    const state::AttentionRuleScope attention(attention_);
    const at::AutoGradMode gradients(true);
    Repetition repetition(*this);
    const SavedTensorScope scope(repetition);
    try {
      repeat_(tensors);
    } catch (const AllRepeated&) {
    } catch (const std::exception&) {
      throw;
    } catch (...) {  // autograd lets nothing else pass
      throw Error(str(name(),
                      " threw something that is no std::exception when backward called it "
                      "again. Throw what derives from std::exception."));
    }
  }
  if (repeated_.size() < saved_.size() || (complete_ && repeated_.size() > saved_.size())) {
    throw ArgumentError(str(
        name(), " saved ", saved_.size(), " tensors for backward in forward and ", repeated_.size(),
        " when backward called it again. It may depend on its inputs, on what it owns and on "
        "random numbers of Torch only, and not on what changes between forward and backward."));
  }
  task_ = task;
}

}  // namespace

struct CheckpointScope::Recording final : SavedTensorHooks {
  explicit Recording(std::shared_ptr<Call> one) : call(std::move(one)) {}
  std::unique_ptr<SavedVariableHooks> next() override {
    return std::make_unique<Placeholder>(call);
  }

  std::shared_ptr<Call> call;
  SavedTensorScope scope{*this};
};

void CheckpointScope::install() { install_saved_tensor_hooks(); }

CheckpointScope::CheckpointScope(const ActivationCheckpointOptions& options,
                                 std::span<const at::Tensor> inputs, const std::type_info& function,
                                 Repeat repeat)
    : recording_(std::make_unique<Recording>(
          std::make_shared<Call>(options, inputs, function, std::move(repeat)))) {}

CheckpointScope::~CheckpointScope() { recording_->call->complete(); }

const at::Tensor& placeholder() {
  static const at::Tensor tensor = at::empty({0});
  return tensor;
}

}  // namespace accelerate::detail::modeling
