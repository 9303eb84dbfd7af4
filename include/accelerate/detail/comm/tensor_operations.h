// accelerate/detail/comm/tensor_operations.h - options and internals of
// accelerate/operations/tensors.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/leaf_checks.h"
#include "accelerate/operations/tensor_information.h"
#include "accelerate/tree.h"

namespace accelerate {

struct ApplyOptions {
  /// Throw for a leaf of another type instead of passing it through.
  bool error_on_other_type = false;
};

struct SendOptions {
  /// Return before the copy is done, where the memory allows it.
  bool non_blocking = false;
  /// Keys of mappings and names of members whose content stays where it is.
  std::vector<std::string> skip_keys = {};
};

/// Positions as in Python's `start:stop:step`; nullopt means from the start, to the end, step 1.
struct Slice {
  std::optional<std::int64_t> start = std::nullopt;
  std::optional<std::int64_t> stop = std::nullopt;
  std::optional<std::int64_t> step = std::nullopt;
};

/// The rows that `pad_input_tensors` adds.
enum class PadFill : std::uint8_t { kZeros, kRepeatLast };

namespace detail::comm {

/// What the operations of accelerate/operations/tensors.h do to single tensors and lists of them.
struct ACCELERATE_API TensorOps {
  [[nodiscard]] static TensorInformation information(const at::Tensor& tensor);
  [[nodiscard]] static std::vector<std::int64_t> shape(const at::Tensor& tensor);
  [[nodiscard]] static at::Tensor empty(const TensorInformation& information);
  [[nodiscard]] static Value listify(const at::Tensor& tensor);
  /// Throws `ArgumentError` for a tensor whose numbers cannot be listed.
  static void check_listable(const TreePath& path, const at::Tensor& tensor);
  [[nodiscard]] static at::Tensor to_fp32(const at::Tensor& tensor);
  [[nodiscard]] static at::Tensor slice(const TreePath& path, const at::Tensor& tensor,
                                        const Slice& slice);
  [[nodiscard]] static std::vector<at::Tensor> concatenate(std::span<const tree::Flat> parts,
                                                           std::int64_t dim);
  [[noreturn]] static void refuse_no_batches();
  /// Throws `ArgumentError` unless the number of items is the number of members of the type.
  static void check_item_count(std::size_t given, std::size_t members, const std::type_info& type);
};

[[nodiscard]] ACCELERATE_API at::Tensor to_device(const at::Tensor& tensor, at::Device device,
                                                  bool non_blocking);

/// A tuple, pair, array or struct with named members, filled in order.
template <class T, class Range>
T with_members(const T& like, const Range& range) {
  T result = like;
  const auto fill = [&range](auto&... members) {
    TensorOps::check_item_count(static_cast<std::size_t>(std::distance(range.begin(), range.end())),
                                sizeof...(members), typeid(T));
    [[maybe_unused]] auto item = range.begin();
    ((members = static_cast<std::remove_reference_t<decltype(members)>>(*item++)), ...);
  };
  if constexpr (tree::detail::node_of<T, at::Tensor>() == tree::Node::kRecord) {
    std::apply([&](const auto&... fields) { fill(result.*fields.member...); },
               tree::detail::fields<T>());
  } else {
    std::apply(fill, result);
  }
  return result;
}

template <class T>
concept HasTo = requires(T& x, at::Device device) { x.to(device); } ||
                requires(T& x, at::Device device) { x.to(device, true); };
/// Holders and pointers of objects that move themselves in place: modules.
template <class T>
concept LeadsToMover = requires(T& x, at::Device device) {
  { x->to(device, true) } -> std::same_as<void>;
  static_cast<bool>(x);
};
template <class T>
concept Sendable =
    TensorTree<T> || HasTo<std::remove_cvref_t<T>> || LeadsToMover<std::remove_cvref_t<T>>;
// Finds functions beside a user's type only: the one of this library does not take such types.
template <class T>
concept HasSendHook = !Sendable<T> && requires(T x, at::Device device, const SendOptions& options) {
  x = send_to_device(std::move(x), device, options);
};

struct SendVisitor {
  at::Device device;
  const SendOptions& options;

  void leaf(const TreePath&, at::Tensor& tensor) {
    tensor = to_device(tensor, device, options.non_blocking);
  }
  template <class T>
  void other(const TreePath&, T& x) {
    if constexpr (std::is_const_v<T>) {
      // The scalars of a `Value`.
    } else if constexpr (requires { x = x.to(device, options.non_blocking); }) {
      x = x.to(device, options.non_blocking);
    } else if constexpr (requires { x = x.to(device); }) {
      x = x.to(device);
    } else if constexpr (requires { x.to(device, options.non_blocking); }) {
      x.to(device, options.non_blocking);
    } else if constexpr (requires { x.to(device); }) {
      x.to(device);
    } else if constexpr (LeadsToMover<T>) {
      if (x) x->to(device, options.non_blocking);
    } else if constexpr (HasSendHook<T>) {
      x = send_to_device(std::move(x), device, options);
    }
  }
  [[nodiscard]] bool enters(const TreePath& path) const {
    for (const auto& key : options.skip_keys) {
      if (key == path.name()) return false;
    }
    return true;
  }
  [[nodiscard]] tree::Order order() const { return tree::Order::kContainer; }
};

class ACCELERATE_API InputPadding {
 public:
  InputPadding(std::int64_t batch_size, std::int64_t num_processes, std::int64_t dim, PadFill fill);
  [[nodiscard]] at::Tensor apply(const TreePath& path, const at::Tensor& tensor) const;

 private:
  std::int64_t target_;
  std::int64_t dim_;
  PadFill fill_;
};

}  // namespace detail::comm
}  // namespace accelerate
