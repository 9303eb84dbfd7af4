#include "formats/pickle_value.h"

#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::formats {
namespace {

std::string entries_repr(const PickleCall::Entries& entries) {
  std::vector<std::string> texts;
  texts.reserve(entries.size());
  for (const auto& [key, value] : entries) texts.push_back(str(key.repr(), ": ", value.repr()));
  return str("{", join(texts), "}");
}

}  // namespace

std::string PickleCall::repr() const {
  std::vector<std::string> texts;
  texts.reserve(args.size());
  for (const auto& argument : args) texts.push_back(argument.repr());
  if (!kwargs.is_none()) texts.push_back("**" + kwargs.repr());
  std::string text = str(function(), "(", join(texts), ")");
  if (!state.is_none()) text += str(" with state ", state.repr());
  if (!items.empty()) text += str(" with items ", Value(items).repr());
  if (!entries.empty()) text += str(" with items ", entries_repr(entries));
  return text;
}

std::string PickleDict::repr() const { return entries_repr(entries); }

std::string PickleInt::repr() const {
  return str("int.from_bytes(", python_bytes_repr(bytes), ", 'little', signed=True)");
}

std::uint64_t PickleStorage::elements() const {
  const auto* known = find_torch_dtype(dtype);
  return known == nullptr ? bytes : bytes / static_cast<std::uint64_t>(known->bytes);
}

std::string PickleStorage::repr() const {
  return str("storage(key=", python_repr(std::string_view(key)), ", bytes=", bytes, ")");
}

std::string PickleTensor::repr() const {
  return str("tensor(..., size=(", join(sizes), sizes.size() == 1 ? ",)" : ")", ", dtype=torch.",
             dtype, is_conjugated ? ", conjugated" : "", is_negated ? ", negated" : "", ")");
}

std::string PickleArray::repr() const {
  return str("array(..., size=(", join(sizes), sizes.size() == 1 ? ",)" : ")", ", dtype=", dtype,
             ")");
}

const TorchDtype* dtype_of(const Value& value) {
  const auto* global = leaf_as<PickleGlobal>(value);
  return global != nullptr && global->module == "torch" ? find_torch_dtype(global->name) : nullptr;
}

const PickleCall* call_of(const Value& value, std::string_view function) {
  const auto* call = leaf_as<PickleCall>(value);
  return call != nullptr && call->function() == function ? call : nullptr;
}

}  // namespace accelerate::detail::formats
