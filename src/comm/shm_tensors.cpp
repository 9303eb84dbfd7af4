#include "comm/shm_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "accelerate/errors.h"
#include "comm/call_checks.h"
#include "comm/call_facts.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using ReduceOp = c10d::ReduceOp;

constexpr std::pair<at::ScalarType, Element> kElements[] = {
    {at::kBool, Element::kBool},
    {at::kChar, Element::kInt8},
    {at::kByte, Element::kUInt8},
    {at::kShort, Element::kInt16},
    {at::kUInt16, Element::kUInt16},
    {at::kInt, Element::kInt32},
    {at::kUInt32, Element::kUInt32},
    {at::kLong, Element::kInt64},
    {at::kUInt64, Element::kUInt64},
    {at::kHalf, Element::kFloat16},
    {at::kBFloat16, Element::kBFloat16},
    {at::kFloat, Element::kFloat32},
    {at::kDouble, Element::kFloat64},
    {at::kComplexFloat, Element::kFloat32},
    {at::kComplexDouble, Element::kFloat64}};

struct NamedReduction {
  ReduceOp::RedOpType operation;
  ShmReduction reduction;
  const char* name;
};

constexpr NamedReduction kReductions[] = {{ReduceOp::SUM, ShmReduction::kSum, "sum"},
                                          {ReduceOp::AVG, ShmReduction::kAverage, "average"},
                                          {ReduceOp::PRODUCT, ShmReduction::kProduct, "product"},
                                          {ReduceOp::MIN, ShmReduction::kMinimum, "minimum"},
                                          {ReduceOp::MAX, ShmReduction::kMaximum, "maximum"},
                                          {ReduceOp::BAND, ShmReduction::kAnd, "bitwise and"},
                                          {ReduceOp::BOR, ShmReduction::kOr, "bitwise or"},
                                          {ReduceOp::BXOR, ShmReduction::kXor, "bitwise xor"}};

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

ShmArithmetic arithmetic_of(const char* kind, const at::Tensor& tensor, const ReduceOp& reduction) {
  check_dense(kind, tensor);
  const auto dtype = tensor.scalar_type();
  const auto* known = std::ranges::find(kReductions, reduction.op_, &NamedReduction::operation);
  if (known == std::end(kReductions)) {
    throw UnsupportedError(str(kind, ": reduction ", static_cast<int>(reduction.op_),
                               " of c10d needs another backend. Scale, then use the sum."));
  }
  const auto* element =
      std::ranges::find(kElements, dtype, &std::pair<at::ScalarType, Element>::first);
  // Real and imaginary parts are added separately; other reductions of complex numbers need both.
  const bool by_parts = !at::isComplexType(dtype) || known->reduction == ShmReduction::kSum ||
                        known->reduction == ShmReduction::kAverage;
  if (element != std::end(kElements) && by_parts && can_reduce(element->second, known->reduction)) {
    return {element->second, known->reduction};
  }
  throw UnsupportedError(str(kind, ": there is no ", known->name, " of ", dtype_literal(dtype),
                             ". Convert the tensor, or gather it and compute the result."));
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
    // Hidden from autograd, as for the tensors that are written directly.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& [to, from] : copies) to.copy_(from);
  };
}

}  // namespace accelerate::detail::comm
