#include "accelerate/detail/core/object_stream.h"

#include <array>
#include <bit>
#include <cstring>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

std::string_view name(ObjectTag tag) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"none", "a bool", "a bool", "an integer", "an unsigned integer", "a floating point number",
       "a string", "bytes", "a list", "a tuple", "a dict", "a map", "an optional", "a variant",
       "a plain struct or a block of numbers", "a tensor", "an object"});
  const auto index = static_cast<std::size_t>(tag) - 1;  // tags begin at 1
  return index < kNames.size() ? kNames[index] : "no known tag";
}

/// Nodes whose number says how many items follow, each of at least one byte.
bool counts_items(ObjectTag tag) {
  return tag == ObjectTag::kList || tag == ObjectTag::kTuple || tag == ObjectTag::kDict ||
         tag == ObjectTag::kMap;
}

void write_key(ObjectWriter& out, const ValueKey& key) {
  if (key.is_string()) return out.text(key.as_string());
  if (key.is_int()) return out.integer(key.as_int());
  out.boolean(key.as_bool());
}

ValueKey to_key(const ObjectReader& in, const Value& value) {
  if (value.is_string()) return ValueKey(value.as_string());
  if (value.is_int()) return ValueKey(value.as_int());
  if (value.is_bool()) return ValueKey(value.as_bool());
  in.refuse("a key that is neither text nor a number");
}

}  // namespace

void ObjectWriter::boolean(bool x) { tag(x ? ObjectTag::kTrue : ObjectTag::kFalse); }

void ObjectWriter::integer(std::int64_t x) {
  tag(ObjectTag::kInteger);
  // Small numbers of either sign take one byte.
  varint((static_cast<std::uint64_t>(x) << 1) ^ static_cast<std::uint64_t>(x >> 63));
}

void ObjectWriter::natural(std::uint64_t x) {
  tag(ObjectTag::kNatural);
  varint(x);
}

void ObjectWriter::real(double x) {
  tag(ObjectTag::kReal);
  const auto bits = std::bit_cast<std::uint64_t>(x);
  for (int shift = 0; shift < 64; shift += 8) bytes_.push_back(static_cast<char>(bits >> shift));
}

void ObjectWriter::text(std::string_view x) {
  open(ObjectTag::kText, x.size());
  bytes_.append(x);
}

void ObjectWriter::open(ObjectTag kind, std::uint64_t count) {
  tag(kind);
  varint(count);
}

void ObjectWriter::raw(std::string_view type, const void* data, std::size_t size) {
  open(ObjectTag::kRaw, type.size());
  bytes_.append(type);
  varint(size);
  if (size > 0) bytes_.append(static_cast<const char*>(data), size);
}

// Seven bits a byte, the lowest first; the top bit says that more follow.
void ObjectWriter::varint(std::uint64_t x) {
  for (; x >= 0x80; x >>= 7) bytes_.push_back(static_cast<char>(x | 0x80));
  bytes_.push_back(static_cast<char>(x));
}

void ObjectWriter::value(const Value& x, const LeafCodec* leaves, int depth) {
  if (depth > kMaxValueDepth) {
    throw ArgumentError(
        str("a value to be sent is nested deeper than ", kMaxValueDepth, " levels"));
  }
  const auto items = [&](ObjectTag kind) {
    open(kind, x.items().size());
    for (const auto& item : x.items()) value(item, leaves, depth + 1);
  };
  if (x.is_none()) return tag(ObjectTag::kNone);
  if (x.is_bool()) return boolean(x.as_bool());
  if (x.is_int()) return integer(x.as_int());
  if (x.is_double()) return real(x.as_double());
  if (x.is_string()) return text(x.as_string());
  if (x.is_list()) return items(ObjectTag::kList);
  if (x.is_tuple()) return items(ObjectTag::kTuple);
  if (x.is_bytes()) {
    open(ObjectTag::kBytes, x.as_bytes().size());
    bytes_.append(x.as_bytes());
  } else if (x.is_dict()) {
    open(ObjectTag::kDict, x.as_dict().size());
    for (const auto& [key, item] : x.as_dict()) {
      write_key(*this, key);
      value(item, leaves, depth + 1);
    }
  } else if (leaves != nullptr) {
    leaves->write(*this, *x.leaf());
  } else {
    throw ArgumentError(str("a value to be sent holds ", x.kind_name(), ", which is not data"));
  }
}

void ObjectReader::refuse(const std::string& found) const {
  throw CommError(str("an object from another process could not be read: found ", found,
                      ". Do all processes run the same program and send the same type?"));
}

void ObjectReader::refuse(const Value& found, const char* wanted) const {
  refuse(str(found.kind_name(), " where ", wanted, " was expected"));
}

ObjectTag ObjectReader::next() const {
  if (rest_.empty()) refuse("the end of the data where a value was expected");
  return static_cast<ObjectTag>(rest_.front());
}

std::string_view ObjectReader::take(std::uint64_t size) {
  if (size > rest_.size()) refuse("the end of the data in the middle of an object");
  const auto piece = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return piece;
}

ObjectTag ObjectReader::tag() { return static_cast<ObjectTag>(take(1).front()); }

void ObjectReader::expect(ObjectTag wanted) {
  const ObjectTag found = tag();
  if (found != wanted) refuse(str(name(found), " where ", name(wanted), " was expected"));
}

std::uint64_t ObjectReader::varint() {
  std::uint64_t result = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = static_cast<std::uint8_t>(take(1).front());
    if (shift == 63 && byte > 1) break;
    result |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return result;
  }
  refuse("a number of more than 64 bits");
}

bool ObjectReader::boolean() {
  const ObjectTag found = tag();
  if (found != ObjectTag::kTrue && found != ObjectTag::kFalse) {
    refuse(str(name(found), " where a bool was expected"));
  }
  return found == ObjectTag::kTrue;
}

std::int64_t ObjectReader::integer() {
  expect(ObjectTag::kInteger);
  const auto folded = varint();
  return static_cast<std::int64_t>((folded >> 1) ^ (~(folded & 1) + 1));
}

std::uint64_t ObjectReader::natural() {
  expect(ObjectTag::kNatural);
  return varint();
}

double ObjectReader::real() {
  expect(ObjectTag::kReal);
  const auto piece = take(8);
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    bits |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(piece[i])) << (8 * i);
  }
  return std::bit_cast<double>(bits);
}

std::string ObjectReader::text() { return std::string(take(open(ObjectTag::kText))); }

std::uint64_t ObjectReader::open(ObjectTag wanted) {
  expect(wanted);
  const auto count = varint();
  if (counts_items(wanted) && count > rest_.size()) refuse("a length beyond the end of the data");
  return count;
}

std::string_view ObjectReader::raw(std::string_view type) {
  if (take(open(ObjectTag::kRaw)) != type) refuse("data of another C++ type");
  return take(varint());
}

void ObjectReader::raw(std::string_view type, void* data, std::size_t size) {
  const auto piece = raw(type);
  if (piece.size() != size) refuse("a struct of another size");
  std::memcpy(data, piece.data(), size);
}

Value ObjectReader::value(const LeafCodec* leaves, int depth) {
  if (depth > kMaxValueDepth) refuse(str("a value nested deeper than ", kMaxValueDepth, " levels"));
  const auto items = [&](ObjectTag kind) {
    Value::List list;
    for (auto count = open(kind); count > 0; --count) list.push_back(value(leaves, depth + 1));
    return list;
  };
  switch (next()) {
    case ObjectTag::kNone:
      return static_cast<void>(tag()), Value();
    case ObjectTag::kFalse:
    case ObjectTag::kTrue:
      return Value(boolean());
    case ObjectTag::kInteger:
      return Value(integer());
    case ObjectTag::kReal:
      return Value(real());
    case ObjectTag::kText:
      return Value(text());
    case ObjectTag::kBytes:
      return Value::bytes(std::string(take(open(ObjectTag::kBytes))));
    case ObjectTag::kList:
      return Value(items(ObjectTag::kList));
    case ObjectTag::kTuple:
      return Value::tuple(items(ObjectTag::kTuple));
    case ObjectTag::kDict: {
      Value::Dict dict;
      for (auto count = open(ObjectTag::kDict); count > 0; --count) {
        const auto key = to_key(*this, value(nullptr, depth + 1));
        dict.set(key, value(leaves, depth + 1));
      }
      return Value(std::move(dict));
    }
    case ObjectTag::kTensor:
    case ObjectTag::kLeaf:
      if (leaves == nullptr) refuse("an object where only data can be");
      return Value(leaves->read(*this));
    default:
      refuse(str(name(tag()), " where a value was expected"));
  }
}

void ObjectReader::finish() const {
  if (!rest_.empty()) refuse(str(rest_.size(), " bytes behind the object"));
}

}  // namespace accelerate::detail::inline core
