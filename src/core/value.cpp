#include "accelerate/value.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::join;
using detail::nearest;
using detail::str;

constexpr std::size_t kNowhere = std::numeric_limits<std::size_t>::max();

// Below this many entries a look at each is faster than hashing.
constexpr std::size_t kIndexFrom = 17;

constexpr std::size_t kKeysShown = 12;

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;  // Clang 16 needs to be told

// Exactly as Python compares: no rounding of the integer to a double.
bool equal_numbers(std::int64_t integer, double number) {
  constexpr double kTwoTo63 = 9223372036854775808.0;
  if (!(number >= -kTwoTo63 && number < kTwoTo63)) return false;
  return std::trunc(number) == number && static_cast<std::int64_t>(number) == integer;
}

bool equal(const Value& a, const Value& b, int depth);

bool equal(std::span<const Value> a, std::span<const Value> b, int depth) {
  return std::ranges::equal(a, b,
                            [depth](const Value& x, const Value& y) { return equal(x, y, depth); });
}

bool equal(const Value::Dict& a, const Value::Dict& b, int depth) {
  if (a.size() != b.size()) return false;
  return std::ranges::all_of(a, [&](const auto& entry) {
    const Value* other = b.get(entry.key());
    return other != nullptr && equal(entry.value(), *other, depth);
  });
}

void check_depth(int depth) {
  if (depth > kMaxValueDepth) {
    throw ArgumentError(str("The value is nested deeper than ", kMaxValueDepth, " levels."));
  }
}

bool equal(const Value& a, const Value& b, int depth) {
  check_depth(depth);
  const auto is_whole = [](const Value& v) { return v.is_int() || v.is_bool(); };
  const auto whole = [](const Value& v) { return v.is_int() ? v.as_int() : v.as_bool() ? 1 : 0; };
  if (is_whole(a) && is_whole(b)) return whole(a) == whole(b);
  if (is_whole(a) && b.is_double()) return equal_numbers(whole(a), b.as_double());
  if (a.is_double() && is_whole(b)) return equal_numbers(whole(b), a.as_double());
  if (a.kind() != b.kind()) return false;
  if (a.is_double()) return a.as_double() == b.as_double();
  if (a.is_string()) return a.as_string() == b.as_string();
  if (a.is_bytes()) return a.as_bytes() == b.as_bytes();
  if (a.is_list() || a.is_tuple()) return equal(a.items(), b.items(), depth + 1);
  if (a.is_dict()) return equal(a.as_dict(), b.as_dict(), depth + 1);
  return a.leaf() == b.leaf() || a.leaf()->equals(*b.leaf());  // none has no leaf
}

void append_repr(std::string& out, const Value& value, int depth);

void append_repr(std::string& out, std::span<const Value> items, int depth) {
  std::string_view separator;
  for (const auto& item : items) {
    out += std::exchange(separator, ", ");
    append_repr(out, item, depth);
  }
}

void append_repr(std::string& out, const Value::Dict& dict, int depth) {
  std::string_view separator;
  for (const auto& [key, value] : dict) {
    out.append(std::exchange(separator, ", ")).append(key.repr()).append(": ");
    append_repr(out, value, depth);
  }
}

void append_repr(std::string& out, const Value& value, int depth) {
  check_depth(depth);
  if (value.is_none()) {
    out += "None";
  } else if (value.is_bool()) {
    out += value.as_bool() ? "True" : "False";
  } else if (value.is_int()) {
    out += std::to_string(value.as_int());
  } else if (value.is_double()) {
    out += detail::python_repr(value.as_double());
  } else if (value.is_string()) {
    out += detail::python_repr(value.as_string());
  } else if (value.is_bytes()) {
    out += detail::python_bytes_repr(value.as_bytes());
  } else if (value.is_dict()) {
    out += '{';
    append_repr(out, value.as_dict(), depth + 1);
    out += '}';
  } else if (value.leaf() != nullptr) {
    out += value.leaf()->repr();
  } else {
    out += value.is_tuple() ? '(' : '[';
    append_repr(out, value.items(), depth + 1);
    out += value.is_list() ? "]" : value.items().size() == 1 ? ",)" : ")";
  }
}

// The first key at which a dict would meet something that is none, as a dotted path; "" when the
// two fit together.
std::string conflict(const Value::Dict& source, const Value::Dict& destination,
                     const std::string& prefix, int depth) {
  check_depth(depth);
  for (const auto& [key, value] : source) {
    const Value* other = destination.get(key);
    if (other == nullptr) continue;
    std::string path = prefix + key.to_string();
    if (value.is_dict() != other->is_dict()) return path;
    if (!value.is_dict()) continue;
    auto below = conflict(value.as_dict(), other->as_dict(), path + ".", depth + 1);
    if (!below.empty()) return below;
  }
  return "";
}

void merge_checked(Value::Dict& source, Value::Dict& destination) {
  for (auto& [key, value] : source) {
    Value* other = destination.get(key);
    if (other != nullptr && other->is_dict()) {
      merge_checked(value.as_dict(), other->as_dict());
    } else {
      destination.set(key, std::move(value));
    }
  }
}

}  // namespace

detail::ValueLeaf::~ValueLeaf() = default;

void detail::refuse_number(std::uint64_t number) {
  throw ArgumentError(str("The number ", number, " does not fit into 64 bits with a sign."));
}

// Keys

ValueKeyView::ValueKeyView(const ValueKey& key) noexcept
    : data_(std::visit([](const auto& data) -> decltype(data_) { return data; }, key.data())) {}

std::string ValueKeyView::repr() const {
  return std::visit(Overloaded{[](std::string_view text) { return detail::python_repr(text); },
                               [](std::int64_t number) { return std::to_string(number); },
                               [](bool truth) { return std::string(truth ? "True" : "False"); }},
                    data_);
}

std::size_t ValueKeyView::hash() const noexcept {
  if (const auto* text = std::get_if<std::string_view>(&data_)) {
    return std::hash<std::string_view>{}(*text);
  }
  const auto* number = std::get_if<std::int64_t>(&data_);
  const auto whole = static_cast<std::uint64_t>(number ? *number : *std::get_if<bool>(&data_));
  // std::hash leaves integers as they are, and the index looks at the low bits: spread them.
  const auto spread = whole * 0x9E3779B97F4A7C15u;
  return static_cast<std::size_t>(spread ^ (spread >> 32));
}

bool operator==(const ValueKeyView& a, const ValueKeyView& b) noexcept {
  const auto* text_a = std::get_if<std::string_view>(&a.data_);
  const auto* text_b = std::get_if<std::string_view>(&b.data_);
  if (text_a != nullptr || text_b != nullptr) {
    return text_a != nullptr && text_b != nullptr && *text_a == *text_b;
  }
  const auto whole = [](const ValueKeyView& key) -> std::int64_t {
    if (const auto* number = std::get_if<std::int64_t>(&key.data_)) return *number;
    return *std::get_if<bool>(&key.data_) ? 1 : 0;
  };
  return whole(a) == whole(b);
}

ValueKey::ValueKey(const ValueKeyView& view)
    : data_(std::visit(
          Overloaded{[](std::string_view text) -> decltype(data_) { return std::string(text); },
                     [](auto other) -> decltype(data_) { return other; }},
          view.data())) {}

const std::string& ValueKey::as_string() const {
  if (const auto* text = std::get_if<std::string>(&data_)) return *text;
  throw ArgumentError(str("The key ", repr(), " is not a string."));
}

std::int64_t ValueKey::as_int() const {
  if (const auto* number = std::get_if<std::int64_t>(&data_)) return *number;
  throw ArgumentError(str("The key ", repr(), " is not an int."));
}

bool ValueKey::as_bool() const {
  if (const auto* truth = std::get_if<bool>(&data_)) return *truth;
  throw ArgumentError(str("The key ", repr(), " is not a bool."));
}

std::string ValueKey::to_string() const { return is_string() ? as_string() : repr(); }

Value ValueKey::value() const {
  return std::visit([](const auto& data) { return Value(data); }, data_);
}

// The dictionary

// Open addressing over positions in `entries_`; a slot holds the position plus one, 0 is free.
// Grown so that at least half of the slots are free.
class ValueDict::Index {
 public:
  explicit Index(const std::vector<Entry>& entries) { rebuild(entries); }

  void rebuild(const std::vector<Entry>& entries) {
    slots_.assign(std::bit_ceil(entries.size() * 4), 0);
    for (std::size_t i = 0; i < entries.size(); ++i) put(entries[i].key(), i);
  }

  void append(const std::vector<Entry>& entries) {
    if (entries.size() * 2 > slots_.size()) return rebuild(entries);
    put(entries.back().key(), entries.size() - 1);
  }

  [[nodiscard]] std::size_t find(const ValueKeyView& key,
                                 const std::vector<Entry>& entries) const noexcept {
    for (std::size_t slot = start(key); slots_[slot] != 0; slot = next(slot)) {
      const std::size_t position = slots_[slot] - 1;
      if (ValueKeyView(entries[position].key()) == key) return position;
    }
    return kNowhere;
  }

 private:
  [[nodiscard]] std::size_t start(const ValueKeyView& key) const noexcept {
    return key.hash() & (slots_.size() - 1);
  }
  [[nodiscard]] std::size_t next(std::size_t slot) const noexcept {
    return (slot + 1) & (slots_.size() - 1);
  }
  void put(const ValueKeyView& key, std::size_t position) {
    std::size_t slot = start(key);
    while (slots_[slot] != 0) slot = next(slot);
    slots_[slot] = position + 1;
  }

  std::vector<std::size_t> slots_;
};

ValueDict::ValueDict() = default;
ValueDict::ValueDict(std::initializer_list<std::pair<ValueKeyView, Value>> entries) {
  for (const auto& [key, value] : entries) set(key, value);
}
ValueDict::ValueDict(const ValueDict& other)
    : entries_(other.entries_),
      index_(other.index_ ? std::make_unique<Index>(*other.index_) : nullptr) {}
ValueDict::ValueDict(ValueDict&& other) noexcept = default;
ValueDict& ValueDict::operator=(const ValueDict& other) {
  if (this != &other) *this = ValueDict(other);
  return *this;
}
ValueDict& ValueDict::operator=(ValueDict&& other) noexcept = default;
ValueDict::~ValueDict() = default;

std::size_t ValueDict::size() const noexcept { return entries_.size(); }
ValueDict::iterator ValueDict::begin() noexcept { return entries_.data(); }
ValueDict::iterator ValueDict::end() noexcept { return entries_.data() + entries_.size(); }
ValueDict::const_iterator ValueDict::begin() const noexcept { return entries_.data(); }
ValueDict::const_iterator ValueDict::end() const noexcept {
  return entries_.data() + entries_.size();
}

std::size_t ValueDict::position(const ValueKeyView& key) const noexcept {
  if (index_) return index_->find(key, entries_);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (ValueKeyView(entries_[i].key()) == key) return i;
  }
  return kNowhere;
}

const Value* ValueDict::get(const ValueKeyView& key) const noexcept {
  const auto where = position(key);
  return where == kNowhere ? nullptr : &entries_[where].value();
}

Value* ValueDict::get(const ValueKeyView& key) noexcept {
  return const_cast<Value*>(std::as_const(*this).get(key));
}

Value ValueDict::get(const ValueKeyView& key, Value fallback) const {
  if (const Value* found = get(key)) return *found;
  return fallback;
}

const Value& ValueDict::at(const ValueKeyView& key) const {
  if (const Value* found = get(key)) return *found;
  refuse(key);
}

Value& ValueDict::at(const ValueKeyView& key) {
  if (Value* found = get(key)) return *found;
  refuse(key);
}

void ValueDict::refuse(const ValueKeyView& key) const {
  std::string message = str("There is no key ", key.repr(), " in the dict");
  if (empty()) throw ArgumentError(message + ": it is empty.");
  std::vector<std::string> known;
  for (const auto& entry : entries_) known.push_back(entry.key().repr());
  if (const auto near = nearest(key.repr(), known); !near.empty()) {
    message += str("; did you mean ", near, "?");
  } else {
    message += '.';
  }
  const auto more = known.size() > kKeysShown ? known.size() - kKeysShown : 0;
  known.resize(known.size() - more);
  message += str(" It has ", join(known));
  if (more > 0) message += str(" and ", more, " more");
  throw ArgumentError(message + ".");
}

Value& ValueDict::operator[](const ValueKeyView& key) {
  if (Value* found = get(key)) return *found;
  return set(key, Value());
}

Value& ValueDict::set(const ValueKeyView& key, Value value) {
  if (Value* found = get(key)) return *found = std::move(value);
  entries_.emplace_back(ValueKey(key), std::move(value));
  try {
    if (index_) {
      index_->append(entries_);
    } else if (entries_.size() >= kIndexFrom) {
      index_ = std::make_unique<Index>(entries_);
    }
  } catch (...) {
    entries_.pop_back();
    throw;
  }
  return entries_.back().value();
}

bool ValueDict::erase(const ValueKeyView& key) {
  const auto where = position(key);
  if (where == kNowhere) return false;
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(where));
  if (index_) index_->rebuild(entries_);
  return true;
}

void ValueDict::clear() noexcept {
  index_.reset();
  entries_.clear();
}

std::vector<ValueKey> ValueDict::keys() const {
  std::vector<ValueKey> keys;
  keys.reserve(size());
  for (const auto& entry : entries_) keys.push_back(entry.key());
  return keys;
}

bool operator==(const ValueDict& a, const ValueDict& b) { return equal(a, b, 0); }

// The value

Value::Value(Leaf leaf) : data_(std::move(leaf)) {
  if (std::get<Leaf>(data_) == nullptr) throw ArgumentError("A value cannot hold a null object.");
}
Value::Value(const Value&) = default;
// A moved-from value stays what it was, emptied; none of the alternatives throws.
Value::Value(Value&&) noexcept = default;
Value& Value::operator=(const Value& other) {
  // By way of a copy: `other` may be a part of what is overwritten.
  if (this != &other) *this = Value(other);
  return *this;
}
Value& Value::operator=(Value&& other) noexcept {
  if (this == &other) return *this;
  const Data taken = std::exchange(data_, std::monostate{});  // dies last, `other` may be inside it
  data_ = std::move(other.data_);
  return *this;
}
Value::~Value() = default;

Value Value::as_tuple_of(List items) {
  Value result;
  result.data_ = Tuple{std::move(items)};
  return result;
}

Value Value::bytes(std::string data) {
  Value result;
  result.data_ = Bytes{std::move(data)};
  return result;
}

Value::Kind Value::kind() const noexcept {
  const auto index = data_.index();
  if (const auto* leaf = std::get_if<Leaf>(&data_)) {
    return *leaf && (*leaf)->is_tensor() ? Kind::kTensor : Kind::kObject;
  }
  return static_cast<Kind>(index);
}

std::string_view Value::kind_name() const {
  return leaf() != nullptr ? leaf()->kind_name() : to_string(kind());
}

std::string_view to_string(Value::Kind kind) {
  static constexpr std::string_view kNames[] = {"none",   "bool",   "int",   "double",
                                                "string", "bytes",  "list",  "tuple",
                                                "dict",   "tensor", "object"};
  return kNames[static_cast<std::size_t>(kind)];
}

const detail::ValueLeaf* Value::leaf() const noexcept {
  const auto* leaf = std::get_if<Leaf>(&data_);
  return leaf != nullptr ? leaf->get() : nullptr;
}

void Value::refuse_kind(std::string_view wanted) const {
  constexpr std::size_t kShown = 60;
  std::string shown;
  if (!is_tensor()) {
    shown = repr();
    if (shown.size() > kShown) {
      std::size_t cut = kShown;  // between two characters
      while ((static_cast<unsigned char>(shown[cut]) & 0xC0) == 0x80) --cut;
      shown = shown.substr(0, cut) + "...";
    }
    shown = ": " + shown;
  }
  throw ArgumentError(str("The value is of kind ", kind_name(), ", not ", wanted, shown));
}

bool Value::as_bool() const {
  if (const auto* truth = std::get_if<bool>(&data_)) return *truth;
  refuse_kind("bool");
}

std::int64_t Value::as_int() const {
  if (const auto* number = std::get_if<std::int64_t>(&data_)) return *number;
  refuse_kind("int");
}

double Value::as_double() const {
  if (const auto* number = std::get_if<double>(&data_)) return *number;
  if (const auto* number = std::get_if<std::int64_t>(&data_)) return static_cast<double>(*number);
  refuse_kind("double");
}

const std::string& Value::as_string() const& {
  if (const auto* text = std::get_if<std::string>(&data_)) return *text;
  refuse_kind("string");
}
std::string Value::as_string() && { return std::move(const_cast<std::string&>(as_string())); }

const std::string& Value::as_bytes() const& {
  if (const auto* bytes = std::get_if<Bytes>(&data_)) return bytes->data;
  refuse_kind("bytes");
}
std::string Value::as_bytes() && { return std::move(const_cast<std::string&>(as_bytes())); }

const Value::List& Value::as_list() const& {
  if (const auto* list = std::get_if<List>(&data_)) return *list;
  refuse_kind("list");
}
Value::List& Value::as_list() & { return const_cast<List&>(std::as_const(*this).as_list()); }
Value::List Value::as_list() && { return std::move(as_list()); }

const Value::List& Value::as_tuple() const& {
  if (const auto* tuple = std::get_if<Tuple>(&data_)) return tuple->items;
  refuse_kind("tuple");
}
Value::List& Value::as_tuple() & { return const_cast<List&>(std::as_const(*this).as_tuple()); }
Value::List Value::as_tuple() && { return std::move(as_tuple()); }

const Value::Dict& Value::as_dict() const& {
  if (const auto* dict = std::get_if<Dict>(&data_)) return *dict;
  refuse_kind("dict");
}
Value::Dict& Value::as_dict() & { return const_cast<Dict&>(std::as_const(*this).as_dict()); }
Value::Dict Value::as_dict() && { return std::move(as_dict()); }

std::span<const Value> Value::items() const& {
  if (const auto* list = std::get_if<List>(&data_)) return *list;
  if (const auto* tuple = std::get_if<Tuple>(&data_)) return tuple->items;
  refuse_kind("list or tuple");
}

std::string Value::repr() const {
  std::string out;
  append_repr(out, *this, 0);
  return out;
}

bool operator==(const Value& a, const Value& b) { return equal(a, b, 0); }

Value::Dict& merge_dicts(const Value::Dict& source, Value::Dict& destination) {
  if (const auto path = conflict(source, destination, "", 0); !path.empty()) {
    throw ArgumentError(str("The dicts cannot be merged: '", path,
                            "' is a dict on one side and not on the other."));
  }
  Value::Dict taken(source);  // a copy: `source` may be a part of `destination`
  merge_checked(taken, destination);
  return destination;
}

}  // namespace accelerate
