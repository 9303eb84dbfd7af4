#include "formats/pickle_value.h"

#include "core/python_text.h"
#include "core/text.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::formats {
namespace {

std::string entries_repr(const PickleCall::Entries& entries) {
  std::vector<std::string> texts;
  texts.reserve(entries.size());
  for (const auto& [key, value] : entries) texts.push_back(str(key.repr(), ": ", value.repr()));
  return str("{", join(texts), "}");
}

}  // namespace

bool PickleGlobal::equals(const ValueLeaf& other) const {
  const auto* global = dynamic_cast<const PickleGlobal*>(&other);
  return global != nullptr && global->module_ == module_ && global->name_ == name_;
}

bool PickleCall::equals(const ValueLeaf& other) const {
  const auto* call = dynamic_cast<const PickleCall*>(&other);
  return call != nullptr && call->module == module && call->name == name && call->args == args &&
         call->kwargs == kwargs && call->state == state && call->items == items &&
         call->entries == entries;
}

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

bool PickleDict::equals(const ValueLeaf& other) const {
  const auto* dict = dynamic_cast<const PickleDict*>(&other);
  return dict != nullptr && dict->entries_ == entries_;
}

std::string PickleDict::repr() const { return entries_repr(entries_); }

bool PickleInt::equals(const ValueLeaf& other) const {
  const auto* number = dynamic_cast<const PickleInt*>(&other);
  return number != nullptr && number->bytes_ == bytes_;
}

std::string PickleInt::repr() const {
  return str("int.from_bytes(", python_bytes_repr(bytes_), ", 'little', signed=True)");
}

std::uint64_t PickleStorage::elements() const {
  const auto* known = find_torch_dtype(dtype);
  return known == nullptr ? bytes : bytes / static_cast<std::uint64_t>(known->bytes);
}

bool PickleStorage::equals(const ValueLeaf& other) const {
  const auto* storage = dynamic_cast<const PickleStorage*>(&other);
  return storage != nullptr && storage->key == key && storage->dtype == dtype &&
         storage->bytes == bytes;
}

std::string PickleStorage::repr() const {
  return str("storage(key=", python_repr(std::string_view(key)), ", bytes=", bytes, ")");
}

bool PickleTensor::equals(const ValueLeaf& other) const {
  const auto* tensor = dynamic_cast<const PickleTensor*>(&other);
  return tensor != nullptr && tensor->storage->equals(*storage) && tensor->dtype == dtype &&
         tensor->offset == offset && tensor->sizes == sizes && tensor->strides == strides &&
         tensor->requires_grad == requires_grad && tensor->is_parameter == is_parameter;
}

std::string PickleTensor::repr() const {
  return str("tensor(..., size=(", join(sizes), sizes.size() == 1 ? ",)" : ")", ", dtype=torch.",
             dtype, ")");
}

bool PickleArray::equals(const ValueLeaf& other) const {
  const auto* array = dynamic_cast<const PickleArray*>(&other);
  return array != nullptr && array->dtype == dtype && array->sizes == sizes &&
         array->bytes == bytes;
}

std::string PickleArray::repr() const {
  return str("array(..., size=(", join(sizes), sizes.size() == 1 ? ",)" : ")", ", dtype=", dtype,
             ")");
}

const PickleCall* call_of(const Value& value, std::string_view function) {
  const auto* call = leaf_as<PickleCall>(value);
  return call != nullptr && call->function() == function ? call : nullptr;
}

}  // namespace accelerate::detail::formats
