#include "accelerate/operations/tensors.h"

#include <ATen/ATen.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "accelerate/value/from_value.h"
#include "accelerate/value/to_value.h"
#include "core/text.h"

namespace accelerate {
namespace tree::detail {

using accelerate::detail::str;

void Mismatch::refuse_structure(const char* operation, const std::string& path, std::size_t tree) {
  throw ArgumentError(str(operation, ": the trees differ in structure: only tree ", tree,
                          " has a tensor at ", path.empty() ? "its root" : path, "."));
}

void Mismatch::check_leaf_count(std::size_t given, std::size_t expected) {
  if (given == expected) return;
  throw ArgumentError(str("unflatten got ", given, " tensors for a tree with ", expected,
                          " leaves. Pass one tensor per leaf, in the order of flatten."));
}

}  // namespace tree::detail

namespace detail::comm {
namespace {

std::string place(const std::string& path) { return path.empty() ? "" : str(" at ", path); }

// Shortens the names of standard types to their usual spelling.
std::string shortened(std::string name) {
  const std::pair<std::string_view, std::string_view> words[] = {
      {"std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >",
       "std::string"},
      {"std::__cxx11::list", "std::list"},
      {"__cxx11::", ""}};
  for (const auto& [from, to] : words) {
    for (auto at = name.find(from); at != std::string::npos; at = name.find(from, at)) {
      name.replace(at, from.size(), to);
    }
  }
  return name;
}

Value nested_list(const at::Tensor& tensor) {
  if (tensor.dim() > 0) {
    Value::List items;
    items.reserve(static_cast<std::size_t>(tensor.size(0)));
    for (std::int64_t i = 0; i < tensor.size(0); ++i) items.push_back(nested_list(tensor[i]));
    return Value(std::move(items));
  }
  const at::Scalar scalar = tensor.item();
  if (scalar.isBoolean()) return Value(scalar.toBool());
  if (scalar.isIntegral(false)) return Value(scalar.toLong());
  if (scalar.isComplex()) {
    const auto z = scalar.toComplexDouble();
    return Value::tuple({Value(z.real()), Value(z.imag())});
  }
  return Value(scalar.toDouble());
}

/// Reads along rows of memory instead of one `item()` call per element.
template <class T>
Value list_of(const T*& data, at::IntArrayRef sizes) {
  if (sizes.empty()) return Value(*data++);
  Value::List items;
  items.reserve(static_cast<std::size_t>(sizes[0]));
  for (std::int64_t i = 0; i < sizes[0]; ++i) items.push_back(list_of(data, sizes.slice(1)));
  return Value(std::move(items));
}
template <class T>
Value list_of(const at::Tensor& tensor) {
  const T* data = tensor.const_data_ptr<T>();
  return list_of(data, tensor.sizes());
}

/// Python's rule for one end of a slice: negative counts from the end, then clamp.
std::int64_t clamped(std::int64_t position, std::int64_t size) {
  if (position < 0) position += size;
  return std::clamp<std::int64_t>(position, 0, size);
}

std::int64_t wrapped_dim(const char* operation, const std::string& path, const at::Tensor& tensor,
                         std::int64_t dim) {
  if (dim >= -tensor.dim() && dim < tensor.dim()) return dim < 0 ? dim + tensor.dim() : dim;
  throw ArgumentError(detail::str(operation, ": the tensor", place(path), " has shape ",
                                  tensor.sizes(), " and no dimension ", dim, "."));
}

}  // namespace

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return shortened(status == 0 ? name.get() : type.name());
}

void RefuseLeaf::other(std::string_view operation, const std::string& path,
                       const std::type_info& type, std::string_view expected) {
  throw ArgumentError(str(operation, " got a leaf", place(path), " of type ", type_name(type),
                          ". Only leaves of type ", expected, " can be used here."));
}

void RefuseLeaf::value(std::string_view operation, const std::string& path, const Value& value,
                       std::string_view expected) {
  throw ArgumentError(str(operation, " got a leaf", place(path), " of kind ", value.kind_name(),
                          ": ", value.repr(), ". Only leaves of ", expected, " can be used here."));
}

void RefuseLeaf::absent(std::string_view operation, const std::string& path) {
  throw ArgumentError(str(operation, ": the tensor", place(path),
                          " is not defined, so that there is nothing to send. Give it a value; for "
                          "one that may be absent on all processes use std::optional."));
}

void BatchSize::refuse_empty(const TreePath& path, const std::type_info& container) {
  throw ArgumentError(str("cannot find the batch size from an empty container: the ",
                          type_name(container), place(path.str()), " holds nothing."));
}

void TensorOps::refuse_no_batches() {
  throw ArgumentError("concatenate got no batches. Pass at least one.");
}

at::Tensor to_device(const at::Tensor& tensor, at::Device device, bool non_blocking) {
  // Torch takes cpu:1 for another device than cpu and would copy.
  if (!tensor.defined() || (tensor.is_cpu() && device.is_cpu())) return tensor;
  return tensor.to(device, non_blocking);
}

TensorInformation TensorOps::information(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.scalar_type()};
}

std::vector<std::int64_t> TensorOps::shape(const at::Tensor& tensor) {
  return tensor.sizes().vec();
}

at::Tensor TensorOps::empty(const TensorInformation& information) {
  if (information.dtype == at::ScalarType::Undefined) return {};
  return at::empty(information.shape, at::TensorOptions(information.dtype));
}

Value TensorOps::listify(const at::Tensor& tensor) {
  auto host = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg();
  if (at::isReducedFloatingType(host.scalar_type())) host = host.to(at::kFloat);
  host = host.contiguous();
  switch (host.scalar_type()) {
    case at::kFloat:
      return list_of<float>(host);
    case at::kDouble:
      return list_of<double>(host);
    case at::kLong:
      return list_of<std::int64_t>(host);
    case at::kInt:
      return list_of<std::int32_t>(host);
    case at::kByte:
      return list_of<std::uint8_t>(host);
    case at::kBool:
      return list_of<bool>(host);
    default:
      return nested_list(host);
  }
}

void TensorOps::check_listable(const TreePath& path, const at::Tensor& tensor) {
  const auto refuse = [&](const auto&... why) {
    throw ArgumentError(detail::str("listify: the tensor", place(path.str()), " ", why...));
  };
  if (tensor.is_nested()) refuse("is nested. Pass its parts: tensor.unbind().");
  if (tensor.layout() != at::kStrided) {
    refuse("is of layout ", tensor.layout(), ". Pass tensor.to_dense().");
  }
  if (tensor.is_meta()) refuse("is on meta and holds no numbers.");
  if (tensor.scalar_type() != at::kUInt64) return;
  // The highest bit is the sign of the same bits as a signed number.
  if (tensor.detach().view(at::kLong).lt(0).any().item<bool>()) {
    refuse("holds a number of 2^63 or more, which does not fit the 64 bits of a Value. Convert it ",
           "to double first.");
  }
}

void TensorOps::check_item_count(std::size_t given, std::size_t members,
                                 const std::type_info& type) {
  if (given == members) return;
  throw ArgumentError(str("honor_type got ", given, " items for a ", type_name(type),
                          ", which has ", members, " members. Pass one item per member."));
}

at::Tensor TensorOps::to_fp32(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

std::int64_t BatchSize::of(const at::Tensor& tensor, const TreePath& path) {
  if (!tensor.defined()) {
    throw ArgumentError(
        str("cannot find the batch size: the tensor", place(path.str()), " is not defined."));
  }
  if (tensor.dim() == 0) {
    throw ArgumentError(
        str("cannot find the batch size: the tensor", place(path.str()), " has no dimension."));
  }
  return tensor.size(0);
}

at::Tensor TensorOps::slice(const TreePath& path, const at::Tensor& tensor, const Slice& slice) {
  const auto step = slice.step.value_or(1);
  if (step == 0) throw ArgumentError("slice_tensors: the step of a slice cannot be 0.");
  if (tensor.dim() == 0) {
    throw ArgumentError(str("slice_tensors: the tensor", place(path.str()),
                            " has no dimension and cannot be sliced. Reshape it to {1} first."));
  }
  const auto size = tensor.size(0);
  if (step < 0) {
    throw ArgumentError(
        str("slice_tensors: the step is ", step,
            ", but tensors are sliced forwards only. Use a positive step and flip."));
  }
  const auto start = clamped(slice.start.value_or(0), size);
  const auto stop = std::max(start, clamped(slice.stop.value_or(size), size));
  return tensor.slice(0, start, stop, step);
}

std::vector<at::Tensor> TensorOps::concatenate(std::span<const tree::Flat> parts,
                                               std::int64_t dim) {
  const tree::Flat& first = parts.front();
  for (std::size_t p = 1; p < parts.size(); ++p) {
    const auto& paths = parts[p].paths;
    const auto [mine, theirs] =
        std::mismatch(first.paths.begin(), first.paths.end(), paths.begin(), paths.end());
    if (mine == first.paths.end() && theirs == paths.end()) continue;
    // The lists are sorted, so they show which batch has the extra leaf.
    const bool missing =
        mine != first.paths.end() && std::find(paths.begin(), paths.end(), *mine) == paths.end();
    const auto& where = missing ? *mine : *theirs;
    throw ArgumentError(str("concatenate: batch ", p,
                            missing ? " has no tensor at " : " has a tensor at ",
                            where.empty() ? "its root" : where,
                            missing ? ", which batch 0 has." : ", which batch 0 does not have."));
  }
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < first.tensors.size(); ++i) {
    std::vector<at::Tensor> pieces;
    for (const auto& part : parts) pieces.push_back(part.tensors[i]);
    try {
      result.push_back(at::cat(pieces, dim));
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error& error) {
      throw ArgumentError(str("concatenate: the tensors", place(first.paths[i]),
                              " do not fit together: ", error.what_without_backtrace()));
    }
  }
  return result;
}

InputPadding::InputPadding(std::int64_t batch_size, std::int64_t num_processes, std::int64_t dim,
                           PadFill fill)
    : target_(0), dim_(dim), fill_(fill) {
  if (batch_size < 1 || num_processes < 1) {
    throw ArgumentError(str("pad_input_tensors: batch_size is ", batch_size, " and num_processes ",
                            num_processes, ", but both must be at least 1."));
  }
  target_ = (batch_size + num_processes - 1) / num_processes * num_processes;
}

at::Tensor InputPadding::apply(const TreePath& path, const at::Tensor& tensor) const {
  const auto dim = wrapped_dim("pad_input_tensors", path.str(), tensor, dim_);
  const auto size = tensor.size(dim);
  if (size == target_) return tensor;
  if (size > target_) {
    throw ArgumentError(str("pad_input_tensors: the tensor", place(path.str()), " has ", size,
                            " rows along dimension ", dim, ", more than the ", target_,
                            " to pad to. Is batch_size right?"));
  }
  auto shape = tensor.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = target_ - size;
  if (fill_ == PadFill::kRepeatLast && size > 0) {
    return at::cat({tensor, tensor.narrow(dim, size - 1, 1).expand(shape)}, dim);
  }
  return at::cat({tensor, at::zeros(shape, tensor.options())}, dim);
}

}  // namespace detail::comm
}  // namespace accelerate
