// src/commands/layout_builder.h - what layouts of models are made from, and with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "commands/model_layout.h"
#include "core/text.h"

namespace accelerate::detail::commands {

/// A config.json. Keys that it leaves out have the default of the model's class in Transformers.
class Settings {
 public:
  Settings(const Value::Dict& config, const std::string& source)
      : config_(config), source_(source) {}

  /// A width, or the size of a vocabulary.
  [[nodiscard]] std::int64_t size(const std::string& key, std::int64_t preset) const {
    return number(key, preset, 1, std::int64_t{1} << 24);
  }
  /// How many layers, or groups of them, there are; each becomes entries of the layout.
  [[nodiscard]] std::int64_t count(const std::string& key, std::int64_t preset) const {
    return number(key, preset, 0, 4096);
  }
  [[nodiscard]] bool truth(const std::string& key, bool preset) const {
    const Value* value = config_.get(key);
    return value != nullptr && value->is_bool() ? value->as_bool() : preset;
  }
  [[nodiscard]] std::string text(const std::string& key, const std::string& preset = "") const {
    const Value* value = config_.get(key);
    return value != nullptr && value->is_string() ? value->as_string() : preset;
  }
  /// The part of a head that is rotated: in `rope_parameters`, or under the name that older files
  /// have.
  [[nodiscard]] double rotary_factor(const std::string& old_key, double preset) const {
    const Value* value = config_.get(old_key);
    if (const Value* rope = config_.get("rope_parameters"); rope != nullptr && rope->is_dict()) {
      if (const Value* inner = rope->as_dict().get("partial_rotary_factor")) value = inner;
    }
    const bool number = value != nullptr && (value->is_double() || value->is_int());
    return number ? std::clamp(value->as_double(), 0.0, 1.0) : preset;
  }

 private:
  [[nodiscard]] std::int64_t number(const std::string& key, std::int64_t preset, std::int64_t min,
                                    std::int64_t max) const {
    const Value* value = config_.get(key);
    if (value == nullptr || value->is_none()) return preset;
    if (value->is_int() && value->as_int() >= min && value->as_int() <= max) return value->as_int();
    throw ConfigError(str(source_, ": '", key, "' is ", value->repr(), ", expected a number from ",
                          min, " to ", max, "."));
  }

  const Value::Dict& config_;
  const std::string& source_;
};

/// Collects the tensors of a model. Paths may end in a list of modules of one size, as a shell has
/// them: "attn.{q_proj,k_proj}".
class Builder {
 public:
  using Sizes = std::initializer_list<std::int64_t>;

  void tensor(const std::string& name, Sizes sizes) { add(name, sizes, 4); }
  void linear(const std::string& paths, std::int64_t in, std::int64_t out, bool bias = true) {
    for (const auto& path : expanded(paths)) {
      tensor(path + ".weight", {in, out});
      if (bias) tensor(path + ".bias", {out});
    }
  }
  void norm(const std::string& paths, std::int64_t size, bool bias = true) {
    for (const auto& path : expanded(paths)) {
      tensor(path + ".weight", {size});
      if (bias) tensor(path + ".bias", {size});
    }
  }
  void embedding(const std::string& path, std::int64_t count, std::int64_t size) {
    tensor(path + ".weight", {count, size});
  }
  void buffer(const std::string& name, Sizes sizes, std::int64_t element_bytes = 4) {
    add(name, sizes, element_bytes);
    layout_.tensors.back().trainable = false;
  }
  /// Those of a rotary embedding that turns a part of each head.
  void rotary(std::int64_t head, double factor) {
    const auto rotated = static_cast<std::int64_t>(static_cast<double>(head) * factor);
    buffer("rotary_emb.inv_freq", {rotated / 2});
    buffer("rotary_emb.original_inv_freq", {rotated / 2});
  }
  /// Calls `add_layer` with the path of each layer: "h.0." to "h.11.".
  template <class AddLayer>
  void layers(const std::string& path, std::int64_t count, const AddLayer& add_layer) {
    for (std::int64_t i = 0; i < count; ++i) add_layer(str(path, ".", i, "."));
  }

  ModelLayout take(const TransformerShape& shape, std::vector<std::string> no_split) {
    layout_.shape = shape;
    layout_.no_split = std::move(no_split);
    return std::move(layout_);
  }

 private:
  static std::vector<std::string> expanded(const std::string& paths) {
    const auto brace = paths.find('{');
    if (brace == paths.npos) return {paths};
    auto names = split(paths.substr(brace + 1, paths.size() - brace - 2), ',');
    for (auto& name : names) name.insert(0, paths, 0, brace);
    return names;
  }

  void add(const std::string& name, Sizes sizes, std::int64_t element_bytes) {
    std::int64_t elements = 1;
    bool fits = true;
    for (const auto size : sizes) fits &= !__builtin_mul_overflow(elements, size, &elements);
    std::int64_t bytes = 0;
    fits &= !__builtin_mul_overflow(elements, element_bytes, &bytes);
    if (!fits) throw ConfigError(str("The size of '", name, "' does not fit into 64 bits."));
    layout_.tensors.push_back({name, elements, bytes});
  }

  ModelLayout layout_;
};

}  // namespace accelerate::detail::commands
