#include <bit>
#include <concepts>
#include <functional>
#include <map>
#include <unordered_map>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/little_endian.h"
#include "formats/pickle.h"
#include "formats/pickle_opcodes.h"
#include "formats/pickle_value.h"
#include "formats/torch_dtypes.h"
#include "formats/utf8.h"

namespace accelerate::detail::formats {
namespace {

/// The fewest bytes of the two's complement, the low byte first; none for 0.
std::string minimal_bytes(std::int64_t number) {
  std::string bytes;
  if (number == 0) return bytes;
  append_little(bytes, number);
  while (bytes.size() > 1) {
    const auto last = static_cast<std::int8_t>(bytes.back());
    const auto before = static_cast<std::int8_t>(bytes[bytes.size() - 2]);
    const bool redundant = (last == 0 && before >= 0) || (last == -1 && before < 0);
    if (!redundant) break;
    bytes.pop_back();
  }
  return bytes;
}

class Writer {
 public:
  std::string write(const Value& root) && {
    opcode(Opcode::kProto, std::uint8_t{2});
    value(root, 0);
    opcode(Opcode::kStop);
    return std::move(out_);
  }

 private:
  void opcode(std::same_as<Opcode> auto... codes) {
    (out_.push_back(static_cast<char>(codes)), ...);
  }
  /// An opcode with a number behind it.
  template <std::integral T>
  void opcode(Opcode code, T number) {
    opcode(code);
    append_little(out_, number);
  }

  void value(const Value& x, int depth) {
    if (depth > kMaxValueDepth) {
      throw ArgumentError(
          str("A value to be saved is nested deeper than ", kMaxValueDepth, " levels."));
    }
    switch (x.kind()) {
      case Value::Kind::kNone:
        return opcode(Opcode::kNone);
      case Value::Kind::kBool:
        return opcode(x.as_bool() ? Opcode::kNewTrue : Opcode::kNewFalse);
      case Value::Kind::kInt:
        return integer(x.as_int());
      case Value::Kind::kDouble:
        return opcode(Opcode::kBinFloat,
                      __builtin_bswap64(std::bit_cast<std::uint64_t>(x.as_double())));
      case Value::Kind::kString:
        return text(x.as_string());
      case Value::Kind::kBytes:
        return bytes(x.as_bytes());
      case Value::Kind::kList:
        opcode(Opcode::kEmptyList);
        return appends(x.as_list(), depth);
      case Value::Kind::kTuple:
        return tuple(x.as_tuple(), depth);
      case Value::Kind::kDict:
        opcode(Opcode::kEmptyDict);
        return set_items(x.as_dict(), depth);
      case Value::Kind::kTensor:
      case Value::Kind::kObject:
        return leaf(*x.leaf(), depth);
    }
  }

  void integer(std::int64_t number) {
    if (std::in_range<std::uint8_t>(number)) {
      opcode(Opcode::kBinInt1, static_cast<std::uint8_t>(number));
    } else if (std::in_range<std::uint16_t>(number)) {
      opcode(Opcode::kBinInt2, static_cast<std::uint16_t>(number));
    } else if (std::in_range<std::int32_t>(number)) {
      opcode(Opcode::kBinInt, static_cast<std::int32_t>(number));
    } else {
      long_integer(minimal_bytes(number));
    }
  }

  void long_integer(std::string_view bytes) {
    opcode(Opcode::kLong1, static_cast<std::uint8_t>(bytes.size()));
    out_ += bytes;
  }

  void text(std::string_view text) {
    if (const auto found = texts_.find(text); found != texts_.end()) return recall(found->second);
    if (text.size() > 0xFFFFFFFFU) throw ArgumentError("A text to be saved has over 4 GiB.");
    if (!is_utf8(text)) {
      throw ArgumentError(str("A text to be saved is not UTF-8: ", python_repr(text.substr(0, 60)),
                              ". Save it as bytes."));
    }
    opcode(Opcode::kBinUnicode, static_cast<std::uint32_t>(text.size()));
    out_ += text;
    texts_.emplace(text, memoize());
  }

  /// As Python does in protocol 2, which has no opcode for them: encoded from text.
  void bytes(std::string_view bytes) {
    std::string latin1;
    latin1.reserve(bytes.size());
    for (const char byte : bytes) append_utf8(latin1, static_cast<unsigned char>(byte));
    global("_codecs", "encode");
    text(latin1);
    text("latin1");
    opcode(Opcode::kTuple2, Opcode::kReduce);
  }

  void global(std::string_view module, std::string_view name) {
    if (module == "builtins") module = "__builtin__";  // protocol 2 is older than Python 3
    const auto key = str(module, "\n", name, "\n");
    if (const auto found = globals_.find(key); found != globals_.end()) {
      return recall(found->second);
    }
    if (module.find('\n') != module.npos || name.find('\n') != name.npos) {
      throw ArgumentError(str("The Python name '", module, ".", name, "' cannot be saved."));
    }
    opcode(Opcode::kGlobal);
    out_ += key;
    globals_.emplace(key, memoize());
  }

  template <class Items>
  void tuple(const Items& items, int depth) {
    if (items.empty()) return opcode(Opcode::kEmptyTuple);
    if (items.size() > 3) opcode(Opcode::kMark);
    for (const Value& item : items) value(item, depth + 1);
    constexpr Opcode kShort[] = {Opcode::kTuple1, Opcode::kTuple2, Opcode::kTuple3};
    opcode(items.size() > 3 ? Opcode::kTuple : kShort[items.size() - 1]);
  }

  void appends(const Value::List& items, int depth) {
    if (items.empty()) return;
    opcode(Opcode::kMark);
    for (const auto& item : items) value(item, depth + 1);
    opcode(Opcode::kAppends);
  }

  static Value key_value(const ValueKey& key) { return key.value(); }
  static const Value& key_value(const Value& key) { return key; }

  void set_items(const auto& entries, int depth) {
    if (entries.empty()) return;
    opcode(Opcode::kMark);
    for (const auto& [key, item] : entries) {
      value(key_value(key), depth + 1);
      value(item, depth + 1);
    }
    opcode(Opcode::kSetItems);
  }

  void leaf(const ValueLeaf& leaf, int depth) {
    if (const auto* tensor = dynamic_cast<const PickleTensor*>(&leaf)) return shared(*tensor);
    if (const auto* storage = dynamic_cast<const PickleStorage*>(&leaf)) {
      return persistent_id(*storage);
    }
    if (const auto* global_leaf = dynamic_cast<const PickleGlobal*>(&leaf)) {
      return global(global_leaf->module, global_leaf->name);
    }
    if (const auto* number = dynamic_cast<const PickleInt*>(&leaf)) {
      return long_integer(number->bytes);
    }
    if (const auto* dict = dynamic_cast<const PickleDict*>(&leaf)) {
      opcode(Opcode::kEmptyDict);
      return set_items(dict->entries, depth);
    }
    const auto* object = dynamic_cast<const PickleCall*>(&leaf);
    if (object == nullptr || !object->kwargs.is_none()) {
      throw ArgumentError(str("A value to be saved holds ", leaf.kind_name(), ": ", leaf.repr(),
                              ". Save numbers, texts, bytes, lists, tuples, dicts and tensors."));
    }
    global(object->module, object->name);
    tuple(object->args, depth);
    opcode(object->by_new ? Opcode::kNewObj : Opcode::kReduce);
    appends(object->items, depth);
    set_items(object->entries, depth);
    if (object->state.is_none()) return;
    value(object->state, depth + 1);
    opcode(Opcode::kBuild);
  }

  /// A tensor at its first place, a reference to it at the others.
  void shared(const PickleTensor& leaf) {
    if (const auto found = tensors_.find(&leaf); found != tensors_.end()) {
      return recall(found->second);
    }
    tensor(leaf);
    tensors_.emplace(&leaf, memoize());
  }

  void tensor(const PickleTensor& leaf) {
    const auto* dtype = find_torch_dtype(leaf.dtype);
    // Python takes the dtype of a _v2 tensor from its storage.
    const bool untyped = dtype == nullptr || leaf.storage->dtype != leaf.dtype;
    if (leaf.is_parameter) global("torch._utils", "_rebuild_parameter");
    global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    opcode(Opcode::kMark);
    persistent_id(*leaf.storage);
    integer(leaf.offset);
    integers(leaf.sizes);
    integers(leaf.strides);
    opcode(leaf.requires_grad && !leaf.is_parameter ? Opcode::kNewTrue : Opcode::kNewFalse);
    no_hooks();
    if (untyped) global("torch", leaf.dtype);
    if (!leaf.has_plain_values()) metadata(leaf);
    opcode(Opcode::kTuple, Opcode::kReduce);
    if (!leaf.is_parameter) return;
    opcode(leaf.requires_grad ? Opcode::kNewTrue : Opcode::kNewFalse);
    no_hooks();
    opcode(Opcode::kTuple3, Opcode::kReduce);
  }

  void metadata(const PickleTensor& leaf) {
    Value::Dict flags;
    if (leaf.is_conjugated) flags.set("conj", true);
    if (leaf.is_negated) flags.set("neg", true);
    opcode(Opcode::kEmptyDict);
    set_items(flags, 0);
  }

  void no_hooks() {
    global("collections", "OrderedDict");
    opcode(Opcode::kEmptyTuple, Opcode::kReduce);
  }

  void integers(const std::vector<std::int64_t>& numbers) {
    tuple(Value::List(numbers.begin(), numbers.end()), 0);
  }

  void persistent_id(const PickleStorage& storage) {
    const auto* dtype = find_torch_dtype(storage.dtype);
    opcode(Opcode::kMark);
    text("storage");
    if (dtype == nullptr) {
      global("torch.storage", "UntypedStorage");
    } else {
      global("torch", dtype->storage);
    }
    text(storage.key);
    text(storage.location);
    integer(static_cast<std::int64_t>(storage.elements()));
    opcode(Opcode::kTuple, Opcode::kBinPersId);
  }

  /// A reference to what `memoize` returned `index` for.
  void recall(std::uint32_t index) { indexed(Opcode::kBinGet, Opcode::kLongBinGet, index); }

  /// Makes the object just written known to `recall`.
  std::uint32_t memoize() {
    indexed(Opcode::kBinPut, Opcode::kLongBinPut, memoized_);
    return memoized_++;
  }

  void indexed(Opcode one_byte, Opcode four_bytes, std::uint32_t index) {
    if (index <= 0xFF) return opcode(one_byte, static_cast<std::uint8_t>(index));
    opcode(four_bytes, index);
  }

  std::string out_;
  std::uint32_t memoized_ = 0;
  std::map<std::string, std::uint32_t, std::less<>> texts_;
  std::map<std::string, std::uint32_t, std::less<>> globals_;
  std::unordered_map<const PickleTensor*, std::uint32_t> tensors_;
};

}  // namespace

std::string pickle_dumps(const Value& value) { return Writer().write(value); }

}  // namespace accelerate::detail::formats
