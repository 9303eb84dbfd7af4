// accelerate/detail/comm/collectives.h - internals of accelerate/operations/collectives.h: from
// trees to tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/util/intrusive_ptr.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/leaf_checks.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/tree.h"

namespace accelerate::detail::comm {

/// The group (null means the processes of `PartialState`) and the line of a call.
struct Call {
  const c10::intrusive_ptr<c10d::ProcessGroup>* group = nullptr;
  std::source_location where;
};

/// The tree that the tensors come from, without its type. Nothing is computed before it is asked
/// for.
class TreeView {
 public:
  template <class T>
  explicit TreeView(const T& tree, Undefined undefined = Undefined::kPassedOver)
      : tree_(&tree),
        undefined_(undefined),
        flatten_(&flatten<T>),
        places_(&places<T>),
        describe_(&describe<T>),
        refuse_(&refuse<T>) {}

  /// The paths of the leaves, in the order in which they are sent.
  [[nodiscard]] std::vector<std::string> paths() const { return flatten_(tree_).paths; }
  /// The paths of the leaves, and the alternatives of variants, in the order in which they are
  /// sent: trees whose tensors belong together have the same ones. Empty for a bare tensor.
  [[nodiscard]] std::vector<std::string> places() const { return places_(tree_); }
  /// The tree with `of(tensor)` in place of each tensor, in container order.
  [[nodiscard]] Value described(Value (*of)(const at::Tensor&)) const {
    return describe_(tree_, of);
  }

  /// Throws `ArgumentError` for a leaf that is no tensor, or a tensor that is not defined. To be
  /// called after debug mode has compared the processes, or the others would wait.
  void refuse_others(std::string_view operation) const { refuse_(operation, tree_, undefined_); }

 private:
  template <class T>
  static tree::Flat flatten(const void* tree) {
    return tree::flatten(*static_cast<const T*>(tree), tree::Order::kSorted);
  }
  struct PlaceVisitor {
    std::vector<std::string> places = {};
    void leaf(const TreePath& path, const at::Tensor&) { places.push_back(path.str()); }
    void alternative(const TreePath& path, std::size_t index) {
      places.push_back(path.str() + " is alternative " + std::to_string(index));
    }
    template <class T>
    void other(const TreePath&, const T&) {}
    [[nodiscard]] bool enters(const TreePath&) const { return true; }
    [[nodiscard]] tree::Order order() const { return tree::Order::kSorted; }
  };
  template <class T>
  static std::vector<std::string> places(const void* tree) {
    PlaceVisitor visitor;
    if constexpr (!std::same_as<T, at::Tensor>) {
      tree::detail::walk<at::Tensor>(*static_cast<const T*>(tree), visitor, TreePath());
    }
    return std::move(visitor.places);
  }
  template <class T>
  static Value describe(const void* tree, Value (*of)(const at::Tensor&)) {
    return to_value(tree::transform<Value>(*of, *static_cast<const T*>(tree)));
  }
  template <class T>
  static void refuse(std::string_view operation, const void* tree, Undefined undefined) {
    detail::comm::refuse_others<at::Tensor>(operation, *static_cast<const T*>(tree), undefined);
  }

  const void* tree_;
  Undefined undefined_;
  tree::Flat (*flatten_)(const void*);
  std::vector<std::string> (*places_)(const void*);
  Value (*describe_)(const void*, Value (*)(const at::Tensor&));
  void (*refuse_)(std::string_view, const void*, Undefined);
};

struct Padding {
  std::int64_t dim;
  at::Scalar pad_index;
  bool pad_first;
};

using Tensors = std::vector<at::Tensor>;

/// The collectives on the leaves of a tree. Each replaces the tensors by the results.
struct ACCELERATE_API LeafCollectives {
  static void gather(Tensors& leaves, const TreeView& view, const Call& call);
  static void broadcast(Tensors& leaves, const TreeView& view, int from_process, const Call& call);
  static void reduce(Tensors& leaves, const TreeView& view, Reduction reduction, double scale,
                     const Call& call);
  static void pad_across_processes(Tensors& leaves, const TreeView& view, const Padding& padding,
                                   const Call& call);
};

/// Runs a collective on the leaves of a tree and puts the results in their places. Every process
/// visits in the same order: by key.
template <class T, class F>
std::remove_cvref_t<T> on_leaves(T&& tree, F&& collective) {
  using Tree = std::remove_cvref_t<T>;
  tree::detail::check_pure_tree<Tree>();
  Tree result = std::forward<T>(tree);
  auto leaves = tree::leaves(result, tree::Order::kSorted);
  collective(leaves, TreeView(std::as_const(result), Undefined::kRefused));
  return tree::unflatten(std::move(result), leaves, tree::Order::kSorted);
}

}  // namespace accelerate::detail::comm
