// accelerate/value/fields.h - structs with named fields.
//
// One line beside a struct lists its members under their names:
//
//     struct Score { double loss = 0; std::int64_t step = 0; };
//     ACCELERATE_VALUE_FIELDS(Score, loss, step);
//
// It is a function, `value_fields(std::type_identity<Score>)`, and makes `to_value` and
// `from_value` work (accelerate/value/to_value.h); `tensor_tree_fields` makes the struct a tensor
// tree as well (accelerate/tree.h).
#pragma once

#include <string_view>
#include <tuple>
#include <type_traits>

namespace accelerate {

/// A member of a struct and its name.
template <class Owner, class Member>
struct Field {
  std::string_view name;
  Member Owner::* member;
};

template <class Owner, class Member>
[[nodiscard]] constexpr Field<Owner, Member> field(std::string_view name, Member Owner::* member) {
  return {name, member};
}

/// Calls `f(field, member)` for each field in order; `member` is a reference into `object`, and
/// `field.name` is its name. The fields may be of a type derived from `Field`.
template <class Object, class... Fields, class F>
constexpr void for_each_field(Object&& object, const std::tuple<Fields...>& fields, const F& f) {
  std::apply([&](const auto&... all) { (f(all, object.*all.member), ...); }, fields);
}

}  // namespace accelerate

/// The fields of `Type` whose names are those of the members (at most 64), as a tuple:
/// ACCELERATE_FIELDS(Score, loss) is std::tuple{accelerate::field("loss", &Score::loss)}.
#define ACCELERATE_FIELDS(Type, ...) \
  std::tuple { ACCELERATE_SCAN_64(ACCELERATE_EACH_FIELD(Type, __VA_ARGS__)) }

/// The function `value_fields` of `Type` with these members.
#define ACCELERATE_VALUE_FIELDS(Type, ...)                \
  constexpr auto value_fields(std::type_identity<Type>) { \
    return ACCELERATE_FIELDS(Type, __VA_ARGS__);          \
  }                                                       \
  static_assert(true)

// The preprocessor does not expand a macro inside of itself: each scan expands one more field.
#define ACCELERATE_EACH_FIELD(Type, name, ...) \
  ::accelerate::field(#name, &Type::name)      \
      __VA_OPT__(, ACCELERATE_EACH_FIELD_AGAIN ACCELERATE_PARENTHESES(Type, __VA_ARGS__))
#define ACCELERATE_EACH_FIELD_AGAIN() ACCELERATE_EACH_FIELD
#define ACCELERATE_PARENTHESES ()
#define ACCELERATE_SCAN_1(...) __VA_ARGS__
#define ACCELERATE_SCAN_4(...) \
  ACCELERATE_SCAN_1(ACCELERATE_SCAN_1(ACCELERATE_SCAN_1(ACCELERATE_SCAN_1(__VA_ARGS__))))
#define ACCELERATE_SCAN_16(...) \
  ACCELERATE_SCAN_4(ACCELERATE_SCAN_4(ACCELERATE_SCAN_4(ACCELERATE_SCAN_4(__VA_ARGS__))))
#define ACCELERATE_SCAN_64(...) \
  ACCELERATE_SCAN_16(ACCELERATE_SCAN_16(ACCELERATE_SCAN_16(ACCELERATE_SCAN_16(__VA_ARGS__))))
