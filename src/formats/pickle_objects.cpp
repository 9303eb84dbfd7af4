#include "formats/pickle_objects.h"

#include <algorithm>
#include <cstring>

#include "core/python_text.h"
#include "core/text.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::size_t kMaxRank = 64;
constexpr std::size_t kMaxStorageName = 64;  // a storage is copied for each of its tensors

[[noreturn]] void fail(const RefuseCall& refuse, std::string_view reason) {
  refuse(reason);
  std::abort();  // `refuse` throws
}

// Plain data

/// The bytes of a text of Latin-1 characters; nullopt if it has others.
std::optional<std::string> latin1(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto point = next_code_point(text, at);
    if (!point.valid || point.value > 0xFF) return std::nullopt;
    bytes.push_back(static_cast<char>(point.value));
    at += point.length;
  }
  return bytes;
}

std::optional<Value> encoded_bytes(const PickleCall& call) {
  if (call.args.empty()) return Value::bytes("");
  if (call.args.size() == 1 && call.args[0].is_bytes()) return call.args[0];
  if (call.args.size() != 2 || !call.args[0].is_string() || !call.args[1].is_string()) {
    return std::nullopt;
  }
  const auto& encoding = call.args[1].as_string();
  if (encoding != "latin1" && encoding != "latin-1") return std::nullopt;
  auto bytes = latin1(call.args[0].as_string());
  if (!bytes) return std::nullopt;
  return Value::bytes(*std::move(bytes));
}

/// An ordered or default dict: its entries; its other attributes, as `_metadata` of modules, are
/// left out.
std::optional<Value> plain_dict(const PickleCall& call, const RefuseCall& refuse) {
  PickleCall::Entries entries;
  const bool pairs = call.name == "OrderedDict" && call.args.size() == 1 && call.args[0].is_list();
  if (pairs) {
    // As Python 2 wrote it: a list of pairs.
    for (const auto& pair : call.args[0].as_list()) {
      const bool sequence = pair.is_list() || pair.is_tuple();
      if (!sequence || pair.items().size() != 2) return std::nullopt;
      entries.emplace_back(pair.items()[0], pair.items()[1]);
    }
  }
  entries.insert(entries.end(), call.entries.begin(), call.entries.end());
  if (!has_plain_keys(entries)) return std::nullopt;
  return Value(to_dict(std::move(entries), refuse));
}

// Tensors

std::optional<std::vector<std::int64_t>> integers(const Value& value) {
  if (!value.is_tuple() && !value.is_list()) return std::nullopt;
  std::vector<std::int64_t> numbers;
  numbers.reserve(value.items().size());
  for (const auto& item : value.items()) {
    if (!item.is_int()) return std::nullopt;
    numbers.push_back(item.as_int());
  }
  return numbers;
}

/// Refuses a tensor that does not lie within its storage.
void check_layout(const PickleTensor& tensor, std::int64_t item_bytes, const RefuseCall& refuse) {
  if (tensor.sizes.size() != tensor.strides.size()) {
    fail(refuse, str("a tensor has ", tensor.sizes.size(), " sizes and ", tensor.strides.size(),
                     " strides"));
  }
  if (tensor.sizes.size() > kMaxRank) {
    fail(refuse,
         str("a tensor has ", tensor.sizes.size(), " dimensions; at most ", kMaxRank, " are read"));
  }
  if (tensor.offset < 0) fail(refuse, str("a tensor has the offset ", tensor.offset));
  bool empty = false;
  std::int64_t bytes = item_bytes;  // as if sizes of 0 were 1: LibTorch computes with them
  std::int64_t last = tensor.offset;
  for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
    const auto size = tensor.sizes[i];
    const auto stride = tensor.strides[i];
    if (size < 0) fail(refuse, str("a tensor has the size ", size));
    if (stride < 0) fail(refuse, str("a tensor has the stride ", stride));
    empty = empty || size == 0;
    const auto extent = std::max<std::int64_t>(size, 1);
    std::int64_t step = 0;
    if (__builtin_mul_overflow(bytes, extent, &bytes) ||
        __builtin_mul_overflow(extent - 1, stride, &step) ||
        __builtin_add_overflow(last, step, &last)) {
      fail(refuse, str("the sizes (", join(tensor.sizes), ") of a tensor are too large"));
    }
  }
  const auto held = tensor.storage->bytes / static_cast<std::uint64_t>(item_bytes);
  const bool inside = empty ? static_cast<std::uint64_t>(tensor.offset) <= held
                            : static_cast<std::uint64_t>(last) < held;
  if (!inside) {
    fail(refuse, str("a tensor reaches to element ", last, " of storage '", tensor.storage->key,
                     "', which has ", held));
  }
}

std::shared_ptr<const PickleStorage> storage_of(const Value& value) {
  const auto* storage = leaf_as<PickleStorage>(value);
  return storage != nullptr ? std::make_shared<PickleStorage>(*storage) : nullptr;
}

/// Views that are conjugated or negated have {"conj": True} or {"neg": True} as the last argument.
void take_metadata(const Value& metadata, PickleTensor& tensor, const RefuseCall& refuse) {
  if (metadata.is_none()) return;
  if (!metadata.is_dict()) {
    fail(refuse, str("the metadata of a tensor is ", metadata.kind_name()));
  }
  for (const auto& [key, value] : metadata.as_dict()) {
    const bool is_conj = key.is_string() && key.as_string() == "conj";
    const bool is_neg = key.is_string() && key.as_string() == "neg";
    if ((!is_conj && !is_neg) || !value.is_bool()) {
      fail(refuse, str("a tensor has the metadata ", key.repr(), ": ", value.repr(),
                       ", which is not read"));
    }
    (is_conj ? tensor.is_conjugated : tensor.is_negated) = value.as_bool();
  }
  if (tensor.is_conjugated && !tensor.dtype.starts_with("complex")) {
    fail(refuse, str("a tensor of dtype torch.", tensor.dtype, " is conjugated"));
  }
}

/// _rebuild_tensor(storage, offset, size, stride), _v2 with (..., requires_grad, hooks, metadata)
/// and _v3 with (..., requires_grad, hooks, dtype, metadata).
Value rebuilt_tensor(const PickleCall& call, bool with_dtype, const RefuseCall& refuse) {
  const auto& args = call.args;
  auto tensor = std::make_shared<PickleTensor>();
  tensor->storage = args.size() < 4 ? nullptr : storage_of(args[0]);
  auto sizes = args.size() < 4 ? std::nullopt : integers(args[2]);
  auto strides = args.size() < 4 ? std::nullopt : integers(args[3]);
  if (!tensor->storage || !args[1].is_int() || !sizes || !strides ||
      (with_dtype && args.size() < 7)) {
    fail(refuse, str("the arguments of ", call.function(), " are not those of a tensor"));
  }
  const auto* dtype = with_dtype ? dtype_of(args[6]) : find_torch_dtype(tensor->storage->dtype);
  if (dtype == nullptr) {
    fail(refuse, str("the dtype of a tensor is ", with_dtype ? args[6].repr() : "unknown",
                     ", which is not one of Torch"));
  }
  tensor->dtype = dtype->name;
  tensor->offset = args[1].as_int();
  tensor->sizes = *std::move(sizes);
  tensor->strides = *std::move(strides);
  tensor->requires_grad = args.size() > 4 && args[4].is_bool() && args[4].as_bool();
  check_layout(*tensor, dtype->bytes, refuse);
  const std::size_t metadata = with_dtype ? 7 : 6;
  if (args.size() > metadata) take_metadata(args[metadata], *tensor, refuse);
  return Value(Value::Leaf(std::move(tensor)));
}

/// _rebuild_parameter(tensor, requires_grad, hooks), and with a state behind them.
std::optional<Value> rebuilt_parameter(const PickleCall& call) {
  const auto* tensor = call.args.empty() ? nullptr : leaf_as<PickleTensor>(call.args[0]);
  if (tensor == nullptr || call.args.size() < 2 || !call.args[1].is_bool()) return std::nullopt;
  auto parameter = std::make_shared<PickleTensor>(*tensor);
  parameter->requires_grad = call.args[1].as_bool();
  parameter->is_parameter = true;
  return Value(Value::Leaf(std::move(parameter)));
}

// numpy

/// Torch's dtype for a little-endian dtype of numpy, or null.
const TorchDtype* numpy_dtype(const Value& value) {
  const auto* call = call_of(value, "numpy.dtype");
  if (call == nullptr || call->args.empty() || !call->args[0].is_string()) return nullptr;
  if (call->state.is_tuple()) {
    const auto state = call->state.items();
    if (state.size() < 2 || !state[1].is_string()) return nullptr;
    if (state[1].as_string() == ">") return nullptr;
  }
  return find_dtype_by(&TorchDtype::numpy, call->args[0].as_string());
}

/// _reconstruct(ndarray, (0,), b'b') with the state (1, shape, dtype, fortran order, bytes).
std::optional<Value> numpy_array(const PickleCall& call) {
  if (!call.state.is_tuple() || call.state.items().size() != 5) return std::nullopt;
  const auto state = call.state.items();
  auto sizes = integers(state[1]);
  const auto* dtype = numpy_dtype(state[2]);
  if (!sizes || dtype == nullptr || !state[3].is_bool() || !state[4].is_bytes())
    return std::nullopt;
  if (state[3].as_bool() && sizes->size() > 1) return std::nullopt;
  std::int64_t bytes = dtype->bytes;
  for (const auto size : *sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  const auto& data = state[4].as_bytes();
  if (sizes->size() > kMaxRank || static_cast<std::uint64_t>(bytes) != data.size()) {
    return std::nullopt;
  }
  auto array = std::make_shared<PickleArray>();
  array->dtype = dtype->name;
  array->sizes = *std::move(sizes);
  array->bytes = data;
  return Value(Value::Leaf(std::move(array)));
}

template <class T>
T number_in(const std::string& bytes) {
  T number{};
  std::memcpy(&number, bytes.data(), sizeof(T));
  return number;
}

/// scalar(dtype, bytes).
std::optional<Value> numpy_scalar(const PickleCall& call) {
  if (call.args.size() != 2 || !call.args[1].is_bytes()) return std::nullopt;
  const auto* dtype = numpy_dtype(call.args[0]);
  const auto& bytes = call.args[1].as_bytes();
  if (dtype == nullptr || bytes.size() != static_cast<std::size_t>(dtype->bytes)) {
    return std::nullopt;
  }
  const auto name = dtype->name;
  if (name == "bool") return Value(bytes[0] != 0);
  if (name == "float64") return Value(number_in<double>(bytes));
  if (name == "float32") return Value(static_cast<double>(number_in<float>(bytes)));
  if (name == "int64") return Value(number_in<std::int64_t>(bytes));
  if (name == "int32") return Value(number_in<std::int32_t>(bytes));
  if (name == "int16") return Value(number_in<std::int16_t>(bytes));
  if (name == "int8") return Value(std::int64_t{number_in<std::int8_t>(bytes)});
  if (name == "uint32") return Value(number_in<std::uint32_t>(bytes));
  if (name == "uint16") return Value(number_in<std::uint16_t>(bytes));
  if (name == "uint8") return Value(std::int64_t{number_in<std::uint8_t>(bytes)});
  return std::nullopt;
}

std::optional<Value> resolve_tensor(const PickleCall& call, const RefuseCall& refuse) {
  if (call.name == "_rebuild_tensor_v2" || call.name == "_rebuild_tensor") {
    return rebuilt_tensor(call, false, refuse);
  }
  if (call.name == "_rebuild_tensor_v3") return rebuilt_tensor(call, true, refuse);
  if (call.name == "_rebuild_parameter" || call.name == "_rebuild_parameter_with_state") {
    return rebuilt_parameter(call);
  }
  return std::nullopt;
}

/// _rebuild_from_type_v2(function, type, args, state): what function(args) makes.
std::optional<Value> resolve_typed(const PickleCall& call, const RefuseCall& refuse) {
  if (call.args.size() != 4 || !call.args[2].is_tuple()) return std::nullopt;
  const auto* function = leaf_as<PickleGlobal>(call.args[0]);
  if (function == nullptr || function->module != "torch._utils") return std::nullopt;
  PickleCall inner;
  inner.module = function->module;
  inner.name = function->name;
  inner.args = call.args[2].as_tuple();
  return resolve_tensor(inner, refuse);
}

}  // namespace

bool has_plain_keys(const PickleCall::Entries& entries) {
  return std::ranges::all_of(entries, [](const auto& entry) {
    return entry.first.is_string() || entry.first.is_int() || entry.first.is_bool();
  });
}

Value::Dict to_dict(PickleCall::Entries entries, const RefuseCall& refuse) {
  Value::Dict dict;
  for (auto& [key, value] : entries) {
    const ValueKey made = key.is_string() ? ValueKey(key.as_string())
                          : key.is_int()  ? ValueKey(key.as_int())
                                          : ValueKey(key.as_bool());
    if (dict.contains(made)) fail(refuse, str("a dict has the key ", made.repr(), " twice"));
    dict.set(made, std::move(value));
  }
  return dict;
}

std::optional<Value> resolve_call(const PickleCall& call, const RefuseCall& refuse) {
  if (call.module == "torch._utils") return resolve_tensor(call, refuse);
  const auto function = call.function();
  if (function == "torch._tensor._rebuild_from_type_v2") return resolve_typed(call, refuse);
  if (function == "collections.OrderedDict" || function == "collections.defaultdict") {
    return plain_dict(call, refuse);
  }
  if (function == "collections.Counter" && call.args.size() == 1 && call.args[0].is_dict()) {
    return call.args[0];
  }
  if (function == "_codecs.encode" || function == "builtins.bytearray" ||
      function == "builtins.bytes") {
    return encoded_bytes(call);
  }
  if (function == "torch.Size" && call.args.size() == 1 && call.args[0].is_tuple()) {
    return call.args[0];
  }
  if (call.module == "numpy.core.multiarray" || call.module == "numpy._core.multiarray") {
    if (call.name == "_reconstruct") return numpy_array(call);
    if (call.name == "scalar") return numpy_scalar(call);
  }
  return std::nullopt;
}

Value resolve_persistent_id(const Value& id, const RefuseCall& refuse) {
  const auto parts = id.is_tuple() ? id.items() : std::span<const Value>();
  const bool storage_id = (parts.size() == 5 || (parts.size() == 6 && parts[5].is_none())) &&
                          parts[0] == Value("storage") && parts[2].is_string() &&
                          parts[3].is_string() && parts[4].is_int();
  const auto* type = storage_id ? leaf_as<PickleGlobal>(parts[1]) : nullptr;
  if (type == nullptr) {
    fail(refuse, "a persistent id is not ('storage', type, key, location, numel)");
  }
  for (const auto& name : {parts[2].as_string(), parts[3].as_string()}) {
    if (name.size() <= kMaxStorageName) continue;
    fail(refuse, str("the key or location of a storage has ", name.size(), " bytes; at most ",
                     kMaxStorageName, " are read"));
  }
  const bool untyped = type->full_name() == "torch.storage.UntypedStorage";
  const auto* dtype =
      type->module == "torch" ? find_dtype_by(&TorchDtype::storage, type->name) : nullptr;
  if (!untyped && dtype == nullptr) {
    fail(refuse, str("a storage is of class ", type->full_name(), ", which is not read"));
  }
  auto storage = std::make_shared<PickleStorage>();
  std::int64_t bytes = 0;
  if (parts[4].as_int() < 0 ||
      __builtin_mul_overflow(parts[4].as_int(), untyped ? 1 : dtype->bytes, &bytes)) {
    fail(refuse, str("a storage has ", parts[4].as_int(), " elements"));
  }
  storage->key = parts[2].as_string();
  storage->dtype = untyped ? "" : dtype->name;
  storage->location = parts[3].as_string();
  storage->bytes = static_cast<std::uint64_t>(bytes);
  return Value(Value::Leaf(std::move(storage)));
}

}  // namespace accelerate::detail::formats
