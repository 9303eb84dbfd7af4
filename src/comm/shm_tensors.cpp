#include "comm/shm_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

#include "accelerate/errors.h"
#include "comm/call_facts.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using ReduceOp = c10d::ReduceOp;

std::optional<Element> element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return Element::kBool;
    case at::kChar:
      return Element::kInt8;
    case at::kByte:
      return Element::kUInt8;
    case at::kShort:
      return Element::kInt16;
    case at::kUInt16:
      return Element::kUInt16;
    case at::kInt:
      return Element::kInt32;
    case at::kUInt32:
      return Element::kUInt32;
    case at::kLong:
      return Element::kInt64;
    case at::kUInt64:
      return Element::kUInt64;
    case at::kHalf:
      return Element::kFloat16;
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kFloat:
    case at::kComplexFloat:
      return Element::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return Element::kFloat64;
    default:
      return std::nullopt;
  }
}

struct NamedReduction {
  Reduction reduction;
  const char* name;
};

std::optional<NamedReduction> reduction_of(ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case ReduceOp::SUM:
      return NamedReduction{Reduction::kSum, "sum"};
    case ReduceOp::AVG:
      return NamedReduction{Reduction::kAverage, "average"};
    case ReduceOp::PRODUCT:
      return NamedReduction{Reduction::kProduct, "product"};
    case ReduceOp::MIN:
      return NamedReduction{Reduction::kMinimum, "minimum"};
    case ReduceOp::MAX:
      return NamedReduction{Reduction::kMaximum, "maximum"};
    case ReduceOp::BAND:
      return NamedReduction{Reduction::kAnd, "bitwise and"};
    case ReduceOp::BOR:
      return NamedReduction{Reduction::kOr, "bitwise or"};
    case ReduceOp::BXOR:
      return NamedReduction{Reduction::kXor, "bitwise xor"};
    default:
      return std::nullopt;
  }
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

void check_dense(const char* kind, const at::Tensor& tensor) {
  if (!tensor.defined()) throw ArgumentError(str(kind, ": a tensor is undefined."));
  if (tensor.is_nested() || tensor.is_quantized() || tensor.layout() != at::kStrided) {
    throw ArgumentError(str(kind, ": the tensor is ",
                            tensor.is_nested()      ? std::string("nested")
                            : tensor.is_quantized() ? std::string("quantized")
                                                    : detail::str("of layout ", tensor.layout()),
                            ", and only dense tensors can be sent. Convert it first."));
  }
  if (!tensor.is_cpu()) {
    throw ArgumentError(str(kind, ": the tensor is on ", tensor.device().str(),
                            ", but shared memory serves the CPU. Move it there first."));
  }
}

ShmArithmetic arithmetic_of(const char* kind, const at::Tensor& tensor, const ReduceOp& reduction) {
  check_dense(kind, tensor);
  const auto dtype = tensor.scalar_type();
  const auto known = reduction_of(reduction.op_);
  if (!known) {
    throw UnsupportedError(str(kind, ": reduction ", static_cast<int>(reduction.op_),
                               " of c10d needs another backend. Scale, then use the sum."));
  }
  const auto element = element_of(dtype);
  // The parts of complex numbers are added up one by one; nothing else can be done to them so.
  const bool by_parts = !at::isComplexType(dtype) || known->reduction == Reduction::kSum ||
                        known->reduction == Reduction::kAverage;
  if (element && by_parts && can_reduce(*element, known->reduction)) {
    return {*element, known->reduction};
  }
  throw UnsupportedError(str(kind, ": there is no ", known->name, " of ", dtype_literal(dtype),
                             ". Convert the tensor, or gather it and compute the result."));
}

void check_dtype(const char* kind, const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.scalar_type() == like.scalar_type()) return;
  throw ArgumentError(str(kind, ": the tensors are of ", dtype_literal(tensor.scalar_type()),
                          " and ", dtype_literal(like.scalar_type()),
                          "; all must be of one dtype."));
}

ShmInput ShmMemory::in(const char* kind, const at::Tensor& tensor) {
  check_dense(kind, tensor);
  auto dense =
      is_plain(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous();
  const ShmInput memory{static_cast<const std::byte*>(dense.const_data_ptr()), dense.nbytes()};
  bytes_ += static_cast<std::int64_t>(memory.bytes);
  held_.push_back(std::move(dense));
  return memory;
}

ShmOutput ShmMemory::out(const char* kind, const at::Tensor& tensor) {
  check_dense(kind, tensor);
  return writable(tensor, is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options()));
}

ShmOutput ShmMemory::in_and_out(const char* kind, const at::Tensor& tensor) {
  check_dense(kind, tensor);
  return writable(tensor, is_plain(tensor)
                              ? tensor
                              : tensor.detach().resolve_conj().resolve_neg().contiguous());
}

ShmOutput ShmMemory::writable(const at::Tensor& tensor, at::Tensor dense) {
  const ShmOutput memory{static_cast<std::byte*>(dense.mutable_data_ptr()), dense.nbytes()};
  bytes_ += static_cast<std::int64_t>(memory.bytes);
  if (!dense.is_same(tensor)) copies_.emplace_back(tensor, dense);
  held_.push_back(std::move(dense));
  return memory;
}

std::function<void()> ShmMemory::copy_back() && {
  return [held = std::move(held_), copies = std::move(copies_)] {
    // As with the tensors that are written directly, autograd is not told.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [to, from] : copies) to.copy_(from);
  };
}

}  // namespace accelerate::detail
