#include "accelerate/value/from_value.h"

#include "core/text.h"

namespace accelerate {

std::string TreePath::str() const {
  std::string above = parent_ == nullptr ? "" : parent_->str();
  switch (step_) {
    case Step::kRoot:
      return above;
    case Step::kNumber:
      return detail::str(above, "[", number_, "]");
    case Step::kKey:
      return detail::str(above, "[", ValueKeyView(name_).repr(), "]");
    case Step::kMember:
      return detail::str(above, ".", name_);
  }
  return above;
}

namespace detail::inline core {

void ReadValue::refuse(const TreePath& path, const Value& value, const std::string& wanted) {
  const auto place = path.str();
  throw ArgumentError(str("the value", place.empty() ? "" : " at ", place, " is of kind ",
                          value.kind_name(), ", not ", wanted, ": ", value.repr()));
}

std::span<const Value> ReadValue::items(const TreePath& path, const Value& value,
                                        std::int64_t size) {
  if (!value.is_list() && !value.is_tuple()) refuse(path, value, "a list or tuple");
  const auto items = value.items();
  if (size >= 0 && std::cmp_not_equal(items.size(), size)) {
    refuse(path, value, str("a list or tuple of ", size, " items"));
  }
  return items;
}

int ReadValue::spelling(const TreePath& path, const Value& value, const EnumTable& table) {
  const int index = value.is_string() ? table.find(value.as_string()) : -1;
  if (index >= 0) return index;
  const std::vector<std::string> choices(table.texts.begin(), table.texts.begin() + table.size);
  refuse(path, value, str("one of: ", join(choices)));
}

}  // namespace detail::inline core
}  // namespace accelerate
