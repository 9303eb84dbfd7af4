// accelerate/detail/data/collate.h - the rules by which samples become a batch, type by type.
//
// Internal to accelerate/data/collate.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/data/batch_tensors.h"
#include "accelerate/tree.h"

namespace accelerate::detail::data {

/// Each throws `ArgumentError`: the samples, or what they have at `path`, cannot be joined.
struct ACCELERATE_API UnequalSamples {
  static void check_lengths(const TreePath& path, std::size_t first, std::size_t other);
  [[noreturn]] static void refuse_missing(const TreePath& path);
  [[noreturn]] static void refuse_none();
};

/// Values are collated by their kinds.
[[nodiscard]] ACCELERATE_API Value collate_values(const std::vector<Value*>& samples,
                                                  const TreePath& path, const LoadContext& context);

template <class T>
constexpr bool kNoCollate = false;

template <class T>
auto collate_node(const std::vector<T*>& samples, const TreePath& path, const LoadContext& context);

template <class T>
using Collated =
    decltype(collate_node(std::declval<const std::vector<T*>&>(), TreePath(), LoadContext()));

template <NumericSample T>
at::Tensor collate_numbers(const std::vector<T*>& samples, const LoadContext& context) {
  using Column = ColumnType<T>;
  auto column =
      BatchTensors::empty_column(samples.size(), c10::CppTypeToScalarType<Column>::value, context);
  auto* out = column.template mutable_data_ptr<Column>();
  for (const T* sample : samples) *out++ = static_cast<Column>(*sample);
  return column;
}

/// The same part of each sample, collated.
template <class T, class Part>
auto collate_part(const std::vector<T*>& samples, const TreePath& path, const LoadContext& context,
                  Part part) {
  using Child = std::remove_reference_t<decltype(part(*samples.front()))>;
  std::vector<Child*> children;
  children.reserve(samples.size());
  for (T* sample : samples) children.push_back(&part(*sample));
  return collate_node(children, path, context);
}

template <class T>
void check_lengths(const std::vector<T*>& samples, const TreePath& path) {
  const auto first = samples.front()->size();
  for (const T* sample : samples) UnequalSamples::check_lengths(path, first, sample->size());
}

template <class T>
auto collate_sequence(const std::vector<T*>& samples, const TreePath& path,
                      const LoadContext& context) {
  std::vector<Collated<typename T::value_type>> result;
  check_lengths(samples, path);
  for (std::size_t i = 0; i < samples.front()->size(); ++i) {
    const auto item = [i](T& sample) -> auto& {
      return *std::next(sample.begin(), std::ptrdiff_t(i));
    };
    result.push_back(collate_part(samples, path.item(std::int64_t(i)), context, item));
  }
  return result;
}

template <class T>
auto collate_fixed(const std::vector<T*>& samples, const TreePath& path,
                   const LoadContext& context) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto part = [&]<std::size_t J>(std::integral_constant<std::size_t, J>) {
      return collate_part(samples, path.item(J), context,
                          [](T& sample) -> auto& { return std::get<J>(sample); });
    };
    if constexpr (tree::detail::kIsArray<T>) {
      return std::array{part(std::integral_constant<std::size_t, I>{})...};
    } else if constexpr (tree::detail::kIs<T, std::pair>) {
      return std::pair{part(std::integral_constant<std::size_t, I>{})...};
    } else {
      return std::tuple{part(std::integral_constant<std::size_t, I>{})...};
    }
  }(std::make_index_sequence<std::tuple_size_v<T>>{});
}

template <class T>
auto collate_mapping(const std::vector<T*>& samples, const TreePath& path,
                     const LoadContext& context) {
  using tree::detail::entry_key;
  using tree::detail::entry_value;
  typename tree::detail::WithMapped<T, Collated<tree::detail::MappedOf<T>>>::type result;
  check_lengths(samples, path);
  for (const auto& entry : *samples.front()) {
    const auto& key = entry_key(entry);
    const TreePath here = path.entry(key);
    const auto value = [&](T& sample) -> auto& {
      for (auto& candidate : sample) {
        if (entry_key(candidate) == key) return entry_value(candidate);
      }
      UnequalSamples::refuse_missing(here);
    };
    auto column = collate_part(samples, here, context, value);
    if constexpr (requires { result.emplace(key, std::move(column)); }) {
      result.emplace(key, std::move(column));
    } else {
      result.insert(key, std::move(column));
    }
  }
  return result;
}

template <class T>
auto collate_optional(const std::vector<T*>& samples, const TreePath& path,
                      const LoadContext& context) {
  using Content = typename T::value_type;
  const auto content = [&](T& sample) -> auto& {
    if (!sample) UnequalSamples::refuse_missing(path);
    return *sample;
  };
  std::optional<Collated<Content>> result;
  for (const T* sample : samples) {
    if (!*sample) continue;
    result = collate_part(samples, path, context, content);
    break;
  }
  return result;
}

/// The struct that is a batch of `T`.
template <class T>
auto batch_record() {
  if constexpr (NamesBatch<T>) {
    return decltype(collated_as(std::type_identity<T>{})){};
  } else if constexpr (tree::detail::NamesItsFields<T>) {
    return std::type_identity<T>{};
  } else {
    return []<template <class, class> class E, class D, class G>(std::type_identity<E<D, G>>) {
      if constexpr (std::is_void_v<G>) {
        return std::type_identity<E<Collated<D>, void>>{};
      } else {
        return std::type_identity<E<Collated<D>, Collated<G>>>{};
      }
    }(std::type_identity<T>{});
  }
}

template <class T>
auto collate_record(const std::vector<T*>& samples, const TreePath& path,
                    const LoadContext& context) {
  using Batch = typename decltype(batch_record<T>())::type;
  // Members that are no fields are copied along.
  auto result = [&] {
    if constexpr (std::same_as<Batch, T>) {
      return Batch(*samples.front());
    } else {
      return Batch();
    }
  }();
  constexpr auto from = tree::detail::fields<T>();
  constexpr auto to = tree::detail::fields<Batch>();
  const auto put = [&](const auto& source, const auto& target) {
    auto column = collate_part(samples, path.member(source.name), context,
                               [&](T& sample) -> auto& { return sample.*source.member; });
    using Wanted = std::remove_cvref_t<decltype(result.*target.member)>;
    static_assert(std::same_as<decltype(column), Wanted>,
                  "accelerate: a field of this struct has another type in a batch (numbers become "
                  "tensors). Declare the struct that is a batch beside it: "
                  "constexpr std::type_identity<Batch> collated_as(std::type_identity<Sample>); "
                  "accelerate/data/collate.h shows how. Or pass a collate function.");
    result.*target.member = std::move(column);
  };
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (put(std::get<I>(from), std::get<I>(to)), ...);
  }(std::make_index_sequence<std::tuple_size_v<decltype(from)>>{});
  return result;
}

template <class T>
auto collate_node(const std::vector<T*>& samples, const TreePath& path,
                  const LoadContext& context) {
  using tree::Node;
  constexpr Node kind = tree::detail::node_of<T, at::Tensor>();
  if constexpr (kind == Node::kLeaf) {
    return BatchTensors::stack(samples, path, context);
  } else if constexpr (NumericSample<T>) {
    return collate_numbers(samples, context);
  } else if constexpr (TextSample<T>) {
    std::vector<std::string> texts;
    for (T* sample : samples) texts.emplace_back(std::move(*sample));
    return texts;
  } else if constexpr (std::same_as<T, Value>) {
    return collate_values(samples, path, context);
  } else if constexpr (kind == Node::kSequence) {
    return collate_sequence(samples, path, context);
  } else if constexpr (kind == Node::kFixed) {
    return collate_fixed(samples, path, context);
  } else if constexpr (kind == Node::kMapping) {
    return collate_mapping(samples, path, context);
  } else if constexpr (kind == Node::kOptional) {
    return collate_optional(samples, path, context);
  } else if constexpr (kind == Node::kRecord) {
    return collate_record(samples, path, context);
  } else {
    static_assert(kNoCollate<T>,
                  "accelerate: there is no rule how samples of this type become a batch. Pass a "
                  "collate function to make_data_loader, or write "
                  "tensor_tree_fields(std::type_identity<YourType>) beside your struct; "
                  "accelerate/data/collate.h shows how.");
  }
}

template <class T>
auto collate_samples(std::vector<T>& samples, const LoadContext& context) {
  if (samples.empty()) UnequalSamples::refuse_none();
  std::vector<T*> pointers;
  pointers.reserve(samples.size());
  if constexpr (std::same_as<T, bool>) {  // whose vector has no addresses
    std::deque<bool> addressable(samples.begin(), samples.end());
    for (bool& sample : addressable) pointers.push_back(&sample);
    return collate_node(pointers, TreePath(), context);
  } else {
    for (T& sample : samples) pointers.push_back(&sample);
    return collate_node(pointers, TreePath(), context);
  }
}

}  // namespace accelerate::detail::data
