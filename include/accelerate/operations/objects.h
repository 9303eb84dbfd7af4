// accelerate/operations/objects.h - move data that is not tensors between processes.
//
// Part of accelerate/operations.h. Takes numbers, bool, enumerations, strings, containers of the
// standard library, torch::OrderedDict, tensors, `Value`, plain structs without pointers (as their
// bytes) and types with `to_value` and `from_value` (accelerate/value/to_value.h). Nothing that
// arrives is executed: a type tag and a length stand before each piece, and both are checked.
//
// An object that one process cannot write (a sparse tensor, a `to_value` that throws) is an error
// on all processes: that one throws the original exception, the others a `CommError` with its text.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <iterator>
#include <source_location>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/object_codec.h"
#include "accelerate/fwd.h"

namespace accelerate {

namespace detail::comm {

using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The place of this process in a group; null means the processes of `PartialState`.
struct GroupPlace {
  int rank = 0;
  int size = 1;
};

/// Makes the bytes of an object. If it throws, the other processes throw `CommError` with its
/// message, and this one what `Encode` threw.
using Encode = std::function<std::string()>;

struct ACCELERATE_API ObjectMessages {
  [[nodiscard]] static GroupPlace place_in(const GroupHandle* group);
  /// Collective. Returns the bytes of every process, in rank order.
  [[nodiscard]] static std::vector<std::string> exchange(const Encode& encode,
                                                         const GroupHandle* group,
                                                         const char* operation,
                                                         std::source_location where);
  /// Collective. Returns the bytes of `from_process`, the only one that calls `encode`. If `count`
  /// differs between processes, each throws `ArgumentError` with all counts.
  [[nodiscard]] static std::string broadcast(const Encode& encode, std::size_t count,
                                             int from_process, const GroupHandle* group,
                                             std::source_location where);
};
[[nodiscard]] inline bool is_alone(const GroupHandle* group) {
  return ObjectMessages::place_in(group).size <= 1;
}
[[nodiscard]] inline int rank_in(const GroupHandle* group) {
  return ObjectMessages::place_in(group).rank;
}

template <class T>
std::vector<T> gather_object(const std::vector<T>& objects, const GroupHandle* group,
                             std::source_location where) {
  check_codec<T>();
  if (is_alone(group)) return objects;
  std::vector<T> result;
  const auto encode = [&] { return encode_object(objects); };
  for (const auto& bytes : ObjectMessages::exchange(encode, group, "gather_object", where)) {
    auto part = decode_object<std::vector<T>>(bytes);
    result.insert(result.end(), std::make_move_iterator(part.begin()),
                  std::make_move_iterator(part.end()));
  }
  return result;
}

template <class T>
std::vector<T> all_gather_object(const T& object, const GroupHandle* group,
                                 std::source_location where) {
  check_codec<T>();
  std::vector<T> result;
  if (is_alone(group)) {
    result.push_back(object);
    return result;
  }
  const auto encode = [&] { return encode_object(object); };
  for (const auto& bytes : ObjectMessages::exchange(encode, group, "all_gather_object", where)) {
    result.push_back(decode_object<T>(bytes));
  }
  return result;
}

template <class T>
T& broadcast_objects(T& objects, std::size_t count, int from_process, const GroupHandle* group,
                     std::source_location where) {
  check_codec<T>();
  if (is_alone(group)) return objects;
  const auto encode = [&] { return encode_object(objects); };
  const auto bytes = ObjectMessages::broadcast(encode, count, from_process, group, where);
  if (rank_in(group) != from_process) objects = decode_object<T>(bytes);
  return objects;
}

}  // namespace detail::comm

/// Collective. The lists of all processes concatenated in rank order. Lists may differ in
/// length and may be empty. A single process gets its list back.
///
///     auto names = gather_object(std::vector<std::string>{host_name});
template <class T>
[[nodiscard]] std::vector<T> gather_object(
    const std::vector<T>& objects, std::source_location where = std::source_location::current()) {
  return detail::comm::gather_object(objects, nullptr, where);
}
template <class T>
[[nodiscard]] std::vector<T> gather_object(
    const std::vector<T>& objects, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::source_location where = std::source_location::current()) {
  return detail::comm::gather_object(objects, &group, where);
}

/// Collective. One object of each process, in rank order.
template <class T>
[[nodiscard]] std::vector<T> all_gather_object(
    const T& object, std::source_location where = std::source_location::current()) {
  return detail::comm::all_gather_object(object, nullptr, where);
}
template <class T>
[[nodiscard]] std::vector<T> all_gather_object(
    const T& object, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::source_location where = std::source_location::current()) {
  return detail::comm::all_gather_object(object, &group, where);
}

/// Collective. Replaces the objects by those of `from_process`, in place, and returns the list.
/// Lists of different lengths throw `ArgumentError` on every process. A tuple takes objects of
/// several types.
///
///     auto settings = std::tuple{std::string(), 0};
///     if (state.is_main_process()) settings = read_settings();
///     broadcast_object_list(settings);
template <class T>
std::vector<T>& broadcast_object_list(
    std::vector<T>& objects, int from_process = 0,
    std::source_location where = std::source_location::current()) {
  return detail::comm::broadcast_objects(objects, objects.size(), from_process, nullptr, where);
}
template <class... Ts>
std::tuple<Ts...>& broadcast_object_list(
    std::tuple<Ts...>& objects, int from_process = 0,
    std::source_location where = std::source_location::current()) {
  return detail::comm::broadcast_objects(objects, sizeof...(Ts), from_process, nullptr, where);
}
template <class T>
std::vector<T>& broadcast_object_list(
    std::vector<T>& objects, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    int from_process = 0, std::source_location where = std::source_location::current()) {
  return detail::comm::broadcast_objects(objects, objects.size(), from_process, &group, where);
}

template <class... Ts>
std::tuple<Ts...>& broadcast_object_list(
    std::tuple<Ts...>& objects, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    int from_process = 0, std::source_location where = std::source_location::current()) {
  return detail::comm::broadcast_objects(objects, sizeof...(Ts), from_process, &group, where);
}

}  // namespace accelerate
