// accelerate/value/path.h - where in a tensor tree a leaf is, for messages: ['images'][0].mask
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

/// The way from the root of a tree to a node. Refers to its parent and to the keys of the tree:
/// take `str()` to keep it.
class ACCELERATE_API TreePath {
 public:
  /// The root.
  TreePath() = default;

  /// An item of a sequence or tuple: [3].
  [[nodiscard]] TreePath item(std::int64_t index) const { return {this, Step::kNumber, {}, index}; }
  /// A member of a struct: .name
  [[nodiscard]] TreePath member(std::string_view name) const {
    return {this, Step::kMember, name, 0};
  }
  /// An entry of a mapping: ['key'] or [7].
  template <class Key>
  [[nodiscard]] TreePath entry(const Key& key) const {
    if constexpr (std::same_as<Key, ValueKey>) {
      if (key.is_string()) return entry(key.as_string());
      return item(key.is_int() ? key.as_int() : std::int64_t{key.as_bool()});
    } else if constexpr (std::convertible_to<const Key&, std::string_view>) {
      return {this, Step::kKey, std::string_view(key), 0};
    } else {
      return item(static_cast<std::int64_t>(key));
    }
  }

  /// The name of this entry or member; "" for items and the root.
  [[nodiscard]] std::string_view name() const noexcept { return name_; }
  /// "['images'][0].mask"; "" for the root.
  [[nodiscard]] std::string str() const;

 private:
  enum class Step : std::uint8_t { kRoot, kNumber, kKey, kMember };
  TreePath(const TreePath* parent, Step step, std::string_view name, std::int64_t number)
      : parent_(parent), step_(step), name_(name), number_(number) {}

  const TreePath* parent_ = nullptr;
  Step step_ = Step::kRoot;
  std::string_view name_ = {};
  std::int64_t number_ = 0;
};

}  // namespace accelerate
