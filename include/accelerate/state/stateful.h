// accelerate/state/stateful.h - objects whose state can be saved and put back.
//
// What saves, restores or inspects a run goes through `Stateful` and knows no other type. Models,
// optimizers, schedulers, data loaders and random states are objects of this kind; so is any type
// with the two functions:
//
//     struct Curriculum {
//       Value state_dict() const { return Value::dict({{"level", level}}); }
//       void load_state_dict(const Value& state) { level = state.at("level").as_int(); }
//       std::int64_t level = 0;
//     };
//     accelerator.register_for_checkpointing(curriculum);
//
// Part of accelerate/accelerator.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

class Stateful {
 public:
  virtual ~Stateful() = default;

  /// Collective for objects that several processes share. Tensors may be the object's own.
  [[nodiscard]] virtual Value state_dict() = 0;
  /// Takes back what `state_dict` returned. Throws if it does not fit.
  virtual void load_state_dict(const Value& state) = 0;
};

/// A type with Python's two functions.
template <class T>
concept HasStateDict = requires(T& object, const Value& state) {
  Value(object.state_dict());
  object.load_state_dict(state);
};

enum class StateKind : std::uint8_t {
  kModel,
  kOptimizer,
  kScheduler,
  kDataLoader,
  kScaler,
  kRandomStates,
  /// Of batches that were accumulated and not applied yet.
  kGradients,
  kCustom
};

/// An object that an accelerator has prepared, or that was registered with it.
struct StateEntry {
  StateKind kind = StateKind::kCustom;
  /// Without extension, as Python names its file: "model", "model_1", "custom_checkpoint_0".
  std::string name = {};
  std::shared_ptr<Stateful> object = nullptr;
  /// For loaders of several processes: each one has a file of its own beside the common one.
  bool per_process = false;
};

namespace detail::state {

template <HasStateDict T>
class StatefulObject final : public Stateful {
 public:
  explicit StatefulObject(std::shared_ptr<T> object) : object_(std::move(object)) {}
  [[nodiscard]] Value state_dict() override { return Value(object_->state_dict()); }
  void load_state_dict(const Value& state) override { object_->load_state_dict(state); }

 private:
  std::shared_ptr<T> object_;
};

/// `object` as a `Stateful`, which shares it.
template <HasStateDict T>
[[nodiscard]] std::shared_ptr<Stateful> make_stateful(std::shared_ptr<T> object) {
  return std::make_shared<StatefulObject<T>>(std::move(object));
}
/// `object` as a `Stateful`, which the caller keeps alive.
template <HasStateDict T>
[[nodiscard]] std::shared_ptr<Stateful> make_stateful(T& object) {
  return make_stateful(std::shared_ptr<T>(std::shared_ptr<void>(), &object));
}

}  // namespace detail::state
}  // namespace accelerate
