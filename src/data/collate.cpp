#include "accelerate/data/collate.h"

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::data {
namespace {

std::string place(const TreePath& path) {
  const auto text = path.str();
  return text.empty() ? "the samples" : text;
}

/// The contents of values that are all of one kind, as pointers that typed rules take.
template <class T, class Get>
at::Tensor collate_as(const std::vector<Value*>& samples, const LoadContext& context, Get get) {
  auto column =
      BatchTensors::empty_column(samples.size(), c10::CppTypeToScalarType<T>::value, context);
  auto* out = column.template mutable_data_ptr<T>();
  for (const Value* sample : samples) *out++ = get(*sample);
  return column;
}

Value collate_lists(const std::vector<Value*>& samples, const TreePath& path,
                    const LoadContext& context) {
  const auto items = [](Value& value) -> Value::List& {
    return value.is_tuple() ? value.as_tuple() : value.as_list();
  };
  const auto size = items(*samples.front()).size();
  Value::List result;
  for (std::size_t i = 0; i < size; ++i) {
    std::vector<Value*> column;
    for (Value* sample : samples) {
      UnequalSamples::check_lengths(path, size, items(*sample).size());
      column.push_back(&items(*sample)[i]);
    }
    result.push_back(collate_values(column, path.item(static_cast<std::int64_t>(i)), context));
  }
  return samples.front()->is_tuple() ? Value::tuple(std::move(result)) : Value(std::move(result));
}

}  // namespace

void UnequalSamples::check_lengths(const TreePath& path, std::size_t first, std::size_t other) {
  if (first == other) return;
  throw ArgumentError(str("The samples of a batch cannot be joined: ", place(path), " have ", first,
                          " and ", other, " items. Make them equally long in the dataset, or pass ",
                          "a collate function that does."));
}

void UnequalSamples::refuse_missing(const TreePath& path) {
  throw ArgumentError(
      str("The samples of a batch cannot be joined: only some of them have ", place(path), "."));
}

void UnequalSamples::refuse_none() {
  throw ArgumentError("A batch without samples cannot be collated: the sampler made an empty one.");
}

Value collate_values(const std::vector<Value*>& samples, const TreePath& path,
                     const LoadContext& context) {
  const auto kind = samples.front()->kind();
  for (const Value* sample : samples) {
    if (sample->kind() == kind) continue;
    throw ArgumentError(
        str("The samples of a batch cannot be joined: ", place(path), " are of different kinds."));
  }
  switch (kind) {
    case Value::Kind::kTensor: {
      std::vector<at::Tensor> tensors;
      std::vector<at::Tensor*> pointers;
      for (const Value* sample : samples) tensors.push_back(sample->as_tensor());
      for (auto& tensor : tensors) pointers.push_back(&tensor);
      return Value(BatchTensors::stack(pointers, path, context));
    }
    case Value::Kind::kBool:
      return Value(collate_as<bool>(samples, context, [](const Value& x) { return x.as_bool(); }));
    case Value::Kind::kInt:
      return Value(
          collate_as<std::int64_t>(samples, context, [](const Value& x) { return x.as_int(); }));
    case Value::Kind::kDouble:
      return Value(
          collate_as<double>(samples, context, [](const Value& x) { return x.as_double(); }));
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return collate_lists(samples, path, context);
    case Value::Kind::kString: {
      Value::List texts;
      for (Value* sample : samples) texts.push_back(std::move(*sample));
      return Value(std::move(texts));
    }
    case Value::Kind::kDict: {
      Value::Dict result;
      for (const auto& entry : samples.front()->as_dict()) {
        const TreePath here = path.entry(entry.key());
        std::vector<Value*> column;
        for (Value* sample : samples) {
          for (auto& candidate : sample->as_dict()) {
            if (candidate.key().data() == entry.key().data()) column.push_back(&candidate.value());
          }
        }
        if (column.size() != samples.size()) UnequalSamples::refuse_missing(here);
        result.set(entry.key(), collate_values(column, here, context));
      }
      return Value(std::move(result));
    }
    default:
      throw ArgumentError(str("There is no rule how ", place(path),
                              " become a batch. Pass a collate function to make_data_loader."));
  }
}

}  // namespace accelerate::detail::data
