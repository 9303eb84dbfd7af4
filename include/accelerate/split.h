// accelerate/split.h - one process's part of a list, a tensor, a map or a dataset.
//
// `PartialState::split_between_processes` does this for the current process; here is the arithmetic
// and what each type of input turns into:
//
//     vector, array, span, homogeneous tuple   std::vector<T>
//     tuple of different types                 std::vector<std::variant<...>>, each type once
//     map                                      the same map, split leaf by leaf (maps nest)
//     variant of these                         the same variant
//     torch::Tensor                            rows of dimension 0
//     Value (list, tuple, dict, tensor)        Value
//     dataset: size() and get(i) or [i]        SplitDataset, which is a dataset again
//
// Inside a map anything else (a number, a string) is handed to every process as it is.
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
#include "accelerate/fwd.h"
#include "accelerate/split_dataset.h"
#include "accelerate/split_range.h"

namespace accelerate::detail {

/// Who takes part in a split, and how.
struct SplitShare {
  int num_processes = 1;
  int process_index = 0;
  SplitOptions options = {};
  /// Where padded tensors go.
  c10::Device device = c10::kCPU;

  [[nodiscard]] SplitPart part(std::int64_t length, PadWith pad_with = PadWith::kLastOfPart) const {
    return split_part(length, num_processes, process_index, options, pad_with);
  }
};

ACCELERATE_API at::Tensor split_leaf(const at::Tensor& tensor, const SplitShare& share);
ACCELERATE_API Value split_leaf(const Value& value, const SplitShare& share);
ACCELERATE_API void add_lengths(const at::Tensor& tensor, const std::string& path,
                                SplitLengths& to);
ACCELERATE_API void add_lengths(const Value& value, const std::string& path, SplitLengths& to);

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
concept SplitTuple = !SplitSequence<T> && requires {
  std::tuple_size<T>::value;
};

template <class T>
inline constexpr bool kIsVariant = false;
template <class... T>
inline constexpr bool kIsVariant<std::variant<T...>> = true;

// The element type that a tuple has as a list: its one type, or a variant with each type once.
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
void visit_lengths(const T& value, const std::string& path, SplitLengths& lengths) {
  if constexpr (SplitsInCpp<T>) {
    add_lengths(value, path, lengths);
  } else if constexpr (SplitMap<T>) {
    for (const auto& [key, item] : value) {
      std::ostringstream name;
      name << path << (path.empty() ? "" : ".") << key;
      visit_lengths(item, name.str(), lengths);
    }
  } else if constexpr (kIsVariant<T>) {
    std::visit([&](const auto& item) { visit_lengths(item, path, lengths); }, value);
  } else if constexpr (SplitSequence<T>) {
    lengths.add(path, static_cast<std::int64_t>(std::ranges::size(value)));
  } else if constexpr (SplitTuple<T>) {
    lengths.add(path, static_cast<std::int64_t>(std::tuple_size_v<T>));
  }
}

/// Splits what `visit_lengths` has checked.
template <class T>
auto split_checked(const T& value, const SplitShare& share) {
  if constexpr (SplitsInCpp<T>) {
    return split_leaf(value, share);
  } else if constexpr (SplitMap<T>) {
    using Item = decltype(split_checked(value.begin()->second, share));
    using Same = std::is_same<Item, typename T::mapped_type>;
    std::conditional_t<Same::value, T, std::map<typename T::key_type, Item>> result;
    for (const auto& [key, item] : value) result.emplace(key, split_checked(item, share));
    return result;
  } else if constexpr (kIsVariant<T>) {
    return std::visit([&](const auto& item) { return T(split_checked(item, share)); }, value);
  } else if constexpr (SplitSequence<T>) {
    return take(value, share.part(static_cast<std::int64_t>(std::ranges::size(value))));
  } else if constexpr (SplitTuple<T>) {
    return take(list_of(value), share.part(static_cast<std::int64_t>(std::tuple_size_v<T>)));
  } else {
    return value;
  }
}

template <class Inputs>
auto split(Inputs&& inputs, const SplitShare& share) {
  using T = std::remove_cvref_t<Inputs>;
  if constexpr (SplitSource<std::remove_reference_t<Inputs>>) {
    using D = std::remove_reference_t<Inputs>;
    const std::int64_t length = dataset_size(std::as_const(inputs).size());
    if (length < 0) throw_unknown_size();
    // A named dataset is referred to, a temporary one is kept: the aliasing pointer owns nothing.
    std::shared_ptr<D> dataset;
    if constexpr (std::is_lvalue_reference_v<Inputs>) {
      dataset = std::shared_ptr<D>(std::shared_ptr<void>(), &inputs);
    } else {
      dataset = std::make_shared<D>(std::move(inputs));
    }
    return SplitDataset<D>(std::move(dataset), share.part(length));
  } else {
    static_assert(
        SplitsInCpp<T> || SplitMap<T> || SplitSequence<T> || SplitTuple<T> || kIsVariant<T>,
        "split_between_processes takes a sequence, a tuple, a map, a tensor, a Value or a "
        "dataset (size() and get(i))");
    if (share.num_processes > 1) {
      SplitLengths lengths;
      visit_lengths<T>(inputs, "", lengths);
    }
    return split_checked<T>(inputs, share);
  }
}

}  // namespace accelerate::detail
