// accelerate/fields.h - structs with named fields.
//
// One function beside a struct lists its members under their names:
//
//     struct Score { double loss = 0; std::int64_t step = 0; };
//     constexpr auto value_fields(std::type_identity<Score>) {
//       return std::tuple{accelerate::field("loss", &Score::loss),
//                         accelerate::field("step", &Score::step)};
//     }
//
// `value_fields` makes `to_value` and `from_value` work (accelerate/to_value.h);
// `tensor_tree_fields` makes the struct a tensor tree as well (accelerate/tree.h).
#pragma once

#include <string_view>
#include <tuple>

namespace accelerate {

/// A member of a struct and its name.
template <class Owner, class Member>
struct Field {
  std::string_view name;
  Member Owner::*member;
};

template <class Owner, class Member>
[[nodiscard]] constexpr Field<Owner, Member> field(std::string_view name, Member Owner::*member) {
  return {name, member};
}

/// Calls `f(field, member)` for each field in order; `member` is a reference into `object`, and
/// `field.name` is its name. The fields may be of a type derived from `Field`.
template <class Object, class... Fields, class F>
constexpr void for_each_field(Object& object, const std::tuple<Fields...>& fields, const F& f) {
  std::apply([&](const auto&... all) { (f(all, object.*all.member), ...); }, fields);
}

}  // namespace accelerate
