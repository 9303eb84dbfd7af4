// accelerate/state/split.h - one process's part of a list, a tensor, a map or a dataset.
//
// The internals of `PartialState::split_between_processes`. What each type of input turns into:
//
//     vector, array, span, homogeneous tuple   std::vector<T>
//     tuple of different types                 std::vector<std::variant<...>>, each type once
//     map                                      the same map, split leaf by leaf (maps nest)
//     variant of these                         the same variant
//     torch::Tensor                            rows of dimension 0
//     Value (list, tuple, dict, tensor)        Value
//     dataset: size() and get(i) or [i]        SplitDataset, which is a dataset again
//
// Inside a map every process gets anything else (a number, a string) unchanged.
#pragma once

#include <c10/core/Device.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <ranges>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/core/split_range.h"
#include "accelerate/fwd.h"
#include "accelerate/state/split_dataset.h"

namespace accelerate::detail::state {

/// The place of a process in the split of one input.
struct SplitShare {
  int num_processes = 1;
  int process_index = 0;
  SplitOptions options = {};
  /// Where padded tensors are put.
  c10::Device device = c10::kCPU;
  /// Of the leaves so far, which must agree.
  SplitLengths lengths = {};
};

/// The parts of leaves. Each throws `ArgumentError` if the length of the leaf at `path` differs
/// from that of another one.
struct ACCELERATE_API SplitLeaf {
  [[nodiscard]] static SplitPart part(std::int64_t length, SplitShare& share,
                                      const std::string& path,
                                      PadWith pad_with = PadWith::kLastOfPart);
  [[nodiscard]] static at::Tensor split(const at::Tensor& tensor, SplitShare& share,
                                        const std::string& path);
  [[nodiscard]] static Value split(const Value& value, SplitShare& share, const std::string& path);

  /// Throws `ArgumentError`: a dataset of unknown size cannot be split.
  [[noreturn]] static void refuse_unknown_size();
};

template <class T>
concept SplitsInCpp = std::same_as<T, at::Tensor> || std::same_as<T, Value>;

template <class T>
concept SplitText = std::convertible_to<const T&, std::string_view>;

template <class T>
concept SplitMap = requires {
  typename T::key_type;
  typename T::mapped_type;
};

template <class T>
concept SplitSequence = !SplitsInCpp<T> && !SplitText<T> && !SplitMap<T> && !SplitSource<T> &&
                        std::ranges::sized_range<const T> && std::ranges::forward_range<const T>;

template <class T>
concept SplitTuple = !SplitSequence<T> && requires { std::tuple_size<T>::value; };

template <class T>
inline constexpr bool kIsVariant = false;
template <class... T>
inline constexpr bool kIsVariant<std::variant<T...>> = true;

// The element type of a tuple as a list: its only type, or a variant with each type once.
template <class Seen, class... Rest>
struct TupleElement;
template <class... Seen>
struct TupleElement<std::tuple<Seen...>> {
  using type = std::variant<Seen...>;
};
template <class Only>
struct TupleElement<std::tuple<Only>> {
  using type = Only;
};
template <class... Seen, class Next, class... Rest>
struct TupleElement<std::tuple<Seen...>, Next, Rest...>
    : TupleElement<std::conditional_t<(std::same_as<Seen, Next> || ...), std::tuple<Seen...>,
                                      std::tuple<Seen..., Next>>,
                   Rest...> {};

template <class Range>
auto take(const Range& all, const SplitPart& part) {
  std::vector<std::ranges::range_value_t<const Range>> mine;
  mine.reserve(static_cast<std::size_t>(part.size()));
  const auto at = [&](std::int64_t i) {
    return std::next(std::ranges::begin(all), static_cast<std::ptrdiff_t>(i));
  };
  mine.insert(mine.end(), at(part.start), at(part.end));
  if (part.padding > 0) {
    mine.insert(mine.end(), static_cast<std::size_t>(part.padding), *at(part.padding_index));
  }
  return mine;
}

template <class T>
auto list_of(const T& tuple) {
  return std::apply(
      [](const auto&... items) {
        using Item = typename TupleElement<std::tuple<>, std::decay_t<decltype(items)>...>::type;
        return std::vector<Item>{Item(items)...};
      },
      tuple);
}

template <class T>
auto split_node(const T& value, SplitShare& share, const std::string& path) {
  if constexpr (SplitsInCpp<T>) {
    return SplitLeaf::split(value, share, path);
  } else if constexpr (SplitMap<T>) {
    using Item = decltype(split_node(value.begin()->second, share, path));
    using Same = std::is_same<Item, typename T::mapped_type>;
    std::conditional_t<Same::value, T, std::map<typename T::key_type, Item>> result;
    for (const auto& [key, item] : value) {
      std::ostringstream name;
      name << path << (path.empty() ? "" : ".") << key;
      result.emplace(key, split_node(item, share, name.str()));
    }
    return result;
  } else if constexpr (kIsVariant<T>) {
    return std::visit([&](const auto& item) { return T(split_node(item, share, path)); }, value);
  } else if constexpr (SplitSequence<T>) {
    return take(value,
                SplitLeaf::part(static_cast<std::int64_t>(std::ranges::size(value)), share, path));
  } else if constexpr (SplitTuple<T>) {
    return take(list_of(value),
                SplitLeaf::part(static_cast<std::int64_t>(std::tuple_size_v<T>), share, path));
  } else {
    return value;
  }
}

template <class Inputs>
auto split(Inputs&& inputs, SplitShare share) {
  using T = std::remove_cvref_t<Inputs>;
  if constexpr (SplitSource<std::remove_reference_t<Inputs>>) {
    using D = std::remove_reference_t<Inputs>;
    const std::int64_t length = dataset_size(std::as_const(inputs).size());
    if (length < 0) SplitLeaf::refuse_unknown_size();
    // A named dataset is referred to, a temporary one is kept: the aliasing pointer owns nothing.
    std::shared_ptr<D> dataset;
    if constexpr (std::is_lvalue_reference_v<Inputs>) {
      dataset = std::shared_ptr<D>(std::shared_ptr<void>(), &inputs);
    } else {
      dataset = std::make_shared<D>(std::forward<Inputs>(inputs));
    }
    return SplitDataset<D>(std::move(dataset), SplitLeaf::part(length, share, ""));
  } else {
    static_assert(
        SplitsInCpp<T> || SplitMap<T> || SplitSequence<T> || SplitTuple<T> || kIsVariant<T>,
        "split_between_processes takes a sequence, a tuple, a map, a tensor, a Value or a "
        "dataset (size() and get(i))");
    return split_node<T>(inputs, share, "");
  }
}

}  // namespace accelerate::detail::state
