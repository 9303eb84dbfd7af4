// The leaves of a `Value` that need LibTorch: tensors, and their descriptions.
#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/detail/comm/object_codec.h"
#include "accelerate/errors.h"
#include "accelerate/operations/tensors.h"
#include "accelerate/value.h"
#include "accelerate/value/from_value.h"
#include "accelerate/value/to_value.h"
#include "core/text.h"

namespace accelerate {
namespace detail::comm {
namespace {

/// A tensor with more elements is shown by shape and dtype only.
constexpr std::int64_t kShownElements = 1000;

std::string shape_text(at::IntArrayRef shape) {
  return str("(", join(shape), shape.size() == 1 ? ",)" : ")");
}

class TensorLeaf final : public ValueLeaf {
 public:
  explicit TensorLeaf(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  [[nodiscard]] bool is_tensor() const override { return true; }
  [[nodiscard]] std::string_view kind_name() const override { return "tensor"; }
  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }

  [[nodiscard]] bool equals(const ValueLeaf& other) const override {
    const auto* leaf = dynamic_cast<const TensorLeaf*>(&other);
    if (leaf == nullptr) return false;
    const at::Tensor& a = tensor_;
    const at::Tensor& b = leaf->tensor_;
    if (a.is_same(b)) return true;
    if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
    return at::equal(a.detach().cpu(), b.detach().cpu());
  }

  [[nodiscard]] std::string repr() const override {
    if (!tensor_.defined()) return "tensor(undefined)";
    if (tensor_.numel() > kShownElements || tensor_.layout() != at::kStrided ||
        tensor_.device().is_meta() || tensor_.is_complex()) {
      return str("tensor(..., size=", shape_text(tensor_.sizes()),
                 ", dtype=", dtype_name(tensor_.scalar_type()), ")");
    }
    std::ostringstream out;
    // at::print wants a double or complex; the list form is exact and one line.
    out << "tensor(" << TensorOps::listify(tensor_).repr();
    const auto dtype = tensor_.scalar_type();
    if (dtype != at::kFloat && dtype != at::kLong && dtype != at::kBool) {
      out << ", dtype=" << dtype_name(dtype);
    }
    out << ')';
    return std::move(out).str();
  }

 private:
  at::Tensor tensor_;
};

class InformationLeaf final : public ValueLeaf {
 public:
  explicit InformationLeaf(TensorInformation information) : information_(std::move(information)) {}

  [[nodiscard]] std::string_view kind_name() const override { return "tensor information"; }
  [[nodiscard]] const TensorInformation& information() const { return information_; }

  [[nodiscard]] bool equals(const ValueLeaf& other) const override {
    const auto* leaf = dynamic_cast<const InformationLeaf*>(&other);
    return leaf != nullptr && leaf->information_ == information_;
  }
  [[nodiscard]] std::string repr() const override {
    return str("TensorInformation(shape=", shape_text(information_.shape),
               ", dtype=", dtype_name(information_.dtype), ")");
  }

 private:
  TensorInformation information_;
};

/// The bytes of a tensor of this shape. Throws if they overflow. LibTorch computes strides as if
/// sizes of 0 were 1, so a size of 0 must not hide the others.
std::uint64_t checked_bytes(const ObjectReader& in, const std::vector<std::int64_t>& shape,
                            std::size_t item_size) {
  auto extent = static_cast<std::int64_t>(item_size);
  bool empty = false;
  for (const auto size : shape) {
    empty = empty || size == 0;
    if (size < 0 || __builtin_mul_overflow(extent, std::max<std::int64_t>(size, 1), &extent)) {
      in.refuse("a tensor of an impossible shape");
    }
  }
  return empty ? 0 : static_cast<std::uint64_t>(extent);
}

void write_tensor(ObjectWriter& out, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested() ||
      tensor.is_meta()) {
    throw ArgumentError(detail::str("a tensor to be sent as an object has layout ", tensor.layout(),
                                    tensor.is_quantized() ? " and is quantized" : "",
                                    tensor.is_nested() ? " and is nested" : "",
                                    tensor.is_meta() ? " and no data" : "",
                                    "; only dense tensors with data can be sent"));
  }
  const auto dense = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  out.open(ObjectTag::kTensor, 1);
  out.number(dense.scalar_type());
  write(out, dense.sizes().vec());
  out.raw("tensor", dense.const_data_ptr(), dense.nbytes());
}

at::ScalarType checked_dtype(ObjectReader& in) {
  const auto code = in.integer();
  if (code < 0 || code > static_cast<std::int64_t>(at::ScalarType::Undefined)) {
    in.refuse("a dtype that this LibTorch does not have");
  }
  return static_cast<at::ScalarType>(code);
}

at::Tensor read_tensor(ObjectReader& in) {
  if (in.open(ObjectTag::kTensor) != 1) in.refuse("a tensor of an unknown form");
  const auto dtype = checked_dtype(in);
  if (dtype == at::ScalarType::Undefined || c10::isQIntType(dtype)) {
    in.refuse("a tensor of a dtype that is never sent");
  }
  const auto shape = read<std::vector<std::int64_t>>(in);
  const auto data = in.raw("tensor");
  if (data.size() != checked_bytes(in, shape, c10::elementSize(dtype))) {
    in.refuse("a tensor whose data does not fit its shape");
  }
  auto tensor = at::empty(shape, at::TensorOptions(dtype));
  if (!data.empty()) std::memcpy(tensor.mutable_data_ptr(), data.data(), data.size());
  return tensor;
}

class TensorLeafCodec final : public LeafCodec {
 public:
  void write(ObjectWriter& out, const ValueLeaf& leaf) const override {
    if (const auto* tensor = dynamic_cast<const TensorLeaf*>(&leaf)) {
      return tensor->tensor().defined() ? write_tensor(out, tensor->tensor()) : out.value(Value());
    }
    const auto* described = dynamic_cast<const InformationLeaf*>(&leaf);
    if (described == nullptr) {
      throw ArgumentError(
          str("a value to be sent holds ", leaf.kind_name(), ", which is not data"));
    }
    out.open(ObjectTag::kLeaf, 1);
    out.number(described->information().dtype);
    detail::comm::write(out, described->information().shape);
  }

  [[nodiscard]] std::shared_ptr<const ValueLeaf> read(ObjectReader& in) const override {
    if (in.next() == ObjectTag::kTensor) return tensor_leaf(read_tensor(in));
    if (in.open(ObjectTag::kLeaf) != 1) in.refuse("an object of an unknown kind");
    TensorInformation information;
    information.dtype = checked_dtype(in);
    information.shape = detail::comm::read<std::vector<std::int64_t>>(in);
    (void)checked_bytes(in, information.shape, 1);
    return std::make_shared<InformationLeaf>(std::move(information));
  }
};

}  // namespace

const TensorInformation* tensor_information(const Value& value) {
  const auto* leaf = dynamic_cast<const InformationLeaf*>(value.leaf());
  return leaf != nullptr ? &leaf->information() : nullptr;
}

const LeafCodec& tensor_leaf_codec() {
  static const TensorLeafCodec codec;
  return codec;
}

}  // namespace detail::comm

// Declared by core, which holds tensors without knowing them.
namespace detail::inline core {

std::shared_ptr<const ValueLeaf> tensor_leaf(const at::Tensor& tensor) {
  return std::make_shared<comm::TensorLeaf>(tensor);
}

std::string dtype_name(std::int8_t dtype) {
  const auto type = static_cast<at::ScalarType>(dtype);
  if (type == at::ScalarType::Undefined) return "undefined";
  return "torch." + std::string(c10::getDtypeNames(type).first);
}

std::int8_t ReadValue::dtype(const TreePath& path, const Value& value) {
  for (std::int8_t code = 0; code <= static_cast<std::int8_t>(at::ScalarType::Undefined); ++code) {
    if (value.is_string() && dtype_name(code) == value.as_string()) return code;
  }
  refuse(path, value, "the name of a dtype such as 'torch.float32'");
}

}  // namespace detail::inline core

const at::Tensor& Value::as_tensor() const {
  const auto* tensor = dynamic_cast<const detail::comm::TensorLeaf*>(leaf());
  if (tensor == nullptr) refuse_kind("tensor");
  return tensor->tensor();
}

TensorInformation::operator Value() const {
  if (dtype == at::ScalarType::Undefined) return {};
  return Value(std::make_shared<detail::comm::InformationLeaf>(*this));
}

}  // namespace accelerate
