#include "comm/call_checks.h"

#include <string>

#include "accelerate/errors.h"
#include "comm/call_facts.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

// detail:: because a tensor's shape brings c10::str along.
std::string shape_of(const at::Tensor& tensor) {
  return detail::str(dtype_literal(tensor.scalar_type()), " and shape ", tensor.sizes());
}

}  // namespace

std::string not_dense(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "nested";
  if (tensor.is_quantized()) return "quantized";
  if (tensor.layout() != at::kStrided) return detail::str("of layout ", tensor.layout());
  return {};
}

void check_dense(const char* kind, const at::Tensor& tensor) {
  if (!tensor.defined()) throw ArgumentError(str(kind, ": a tensor is undefined."));
  if (const auto what = not_dense(tensor); !what.empty()) {
    throw ArgumentError(str(kind, ": the tensor is ", what,
                            ", and only dense tensors can be sent. Convert it first."));
  }
  if (!tensor.is_cpu()) {
    throw ArgumentError(str(kind, ": the tensor is on ", tensor.device().str(),
                            ", but shared memory serves the CPU. Move it there first."));
  }
}

void check_dtype(const char* kind, const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.scalar_type() == like.scalar_type()) return;
  throw ArgumentError(str(kind, ": the tensors are of ", dtype_literal(tensor.scalar_type()),
                          " and ", dtype_literal(like.scalar_type()),
                          "; all must be of one dtype."));
}

const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* kind) {
  if (tensors.size() == 1) return tensors.front();
  throw ArgumentError(str(kind, ": one tensor was expected, not ", tensors.size(), "."));
}

const std::vector<at::Tensor>& only_one(const std::vector<std::vector<at::Tensor>>& lists,
                                        const char* kind) {
  if (lists.size() == 1) return lists.front();
  throw ArgumentError(str(kind, ": one list of tensors was expected, not ", lists.size(), "."));
}

void check_count(const char* kind, const char* what, std::size_t count, int size) {
  if (count == static_cast<std::size_t>(size)) return;
  throw ArgumentError(str(kind, ": there are ", count, " ", what, " for ", size, " ranks."));
}

void check_rank(const char* kind, const char* what, std::int64_t rank, int size) {
  if (rank >= 0 && rank < size) return;
  throw ArgumentError(
      str(kind, ": the ", what, " is ", rank, ", but there are ranks 0 to ", size - 1, "."));
}

void check_like(const char* kind, const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.scalar_type() == like.scalar_type() && tensor.numel() == like.numel()) return;
  throw ArgumentError(str(kind, ": a tensor of ", shape_of(tensor), " was given where one of ",
                          shape_of(like), " is needed."));
}

void check_whole(const char* kind, const at::Tensor& whole, const at::Tensor& part, int size) {
  if (whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * size) return;
  throw ArgumentError(str(kind, ": a tensor of ", shape_of(whole), " cannot hold ", size,
                          " parts of ", shape_of(part), "."));
}

void check_pairs(const char* kind, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs) {
  if (outputs.size() == inputs.size()) return;
  throw ArgumentError(str(kind, ": there are ", outputs.size(), " tensors for the results of ",
                          inputs.size(), "."));
}

}  // namespace accelerate::detail::comm
