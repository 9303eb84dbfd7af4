// Packed weights that callers have put together: kernels read them by pointers.
#include <ATen/ATen.h>

#include <bit>

#include "accelerate/errors.h"
#include "core/text.h"
#include "quantization/tensors.h"

namespace accelerate::detail::quantization {
namespace {

using quant::Int8Weight;
using quant::QuantState;

std::string described(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return str(at::toString(tensor.scalar_type()), " of shape [", join(tensor.sizes()), "] on ",
             tensor.device().str());
}

/// `elements` of `dtype` on the device of the codes, one after the other.
at::Tensor member(const char* what, const char* name, const at::Tensor& tensor,
                  std::int64_t elements, at::ScalarType dtype, c10::Device device) {
  if (!tensor.defined() || tensor.numel() != elements || tensor.scalar_type() != dtype ||
      tensor.device() != device) {
    throw ArgumentError(str(what, ": ", name, " is ", described(tensor), ", and ", elements,
                            " elements of ", at::toString(dtype), " on ", device.str(),
                            " are expected."));
  }
  return tensor.contiguous();
}

}  // namespace

void check_blocksize(std::int64_t blocksize, std::int64_t least, const char* what) {
  if (blocksize >= least && blocksize <= 4096 &&
      std::has_single_bit(static_cast<std::uint64_t>(blocksize))) {
    return;
  }
  throw ArgumentError(
      str(what, ": blocksize is ", blocksize, ". Choose a power of two from ", least, " to 4096."));
}

QuantState checked_scales(const char* what, QuantState state, std::int64_t values,
                          std::int64_t codes, c10::Device device) {
  check_blocksize(state.blocksize, 32, what);
  const auto blocks = blocks_of(values, state.blocksize);
  state.code = member(what, "the map of its codes", state.code, codes, at::kFloat, device);
  if (!state.nested()) {
    state.absmax = member(what, "absmax", state.absmax, blocks, at::kFloat, device);
    return state;
  }
  if (!state.offset) throw ArgumentError(str(what, ": the state has a state2 and no offset."));
  state.absmax = member(what, "absmax", state.absmax, blocks, at::kByte, device);
  state.state2 =
      std::make_shared<const QuantState>(checked_scales(what, *state.state2, blocks, 256, device));
  return state;
}

std::pair<at::Tensor, QuantState> checked(const char* what, const at::Tensor& packed,
                                          const QuantState& state) {
  static_cast<void>(four_bit_type(state.quant_type));
  std::int64_t values = 1;
  for (const auto size : state.shape) {
    if (size < 0 || __builtin_mul_overflow(values, size, &values)) {
      throw ArgumentError(str(what, ": the shape of the state is [", join(state.shape), "]."));
    }
  }
  const auto bytes = packed.defined() ? static_cast<std::int64_t>(packed.nbytes()) : 0;
  if (!packed.defined() || bytes != values / 2 + values % 2) {
    throw ArgumentError(str(what, ": ", bytes, " bytes of codes do not make a tensor of shape [",
                            join(state.shape), "]."));
  }
  return {packed.contiguous(), checked_scales(what, state, values, 16, packed.device())};
}

Int8Weight checked(const char* what, const Int8Weight& weight) {
  const auto& codes = weight.CB;
  if (!codes.defined() || codes.dim() != 2 || codes.scalar_type() != at::kChar) {
    throw ArgumentError(
        str(what, ": CB is ", described(codes), ", and a matrix of Char is expected."));
  }
  return {.CB = codes.contiguous(),
          .SCB = member(what, "SCB", weight.SCB, codes.size(0), at::kFloat, codes.device()),
          .outlier_columns = weight.outlier_columns};
}

void check_product(const char* what, const at::Tensor& x, const at::Tensor& bias,
                   std::int64_t outputs, c10::Device device) {
  if (x.device() != device) {
    throw ArgumentError(str(what, ": the input is on ", x.device().str(), " and the weight on ",
                            device.str(), "."));
  }
  if (bias.defined() && bias.dim() > 0 && bias.device() != device) {
    throw ArgumentError(str(what, ": the bias is on ", bias.device().str(), " and the weight on ",
                            device.str(), "."));
  }
  if (!bias.defined() || bias.dim() == 0 || bias.sizes() == at::IntArrayRef({outputs})) return;
  throw ArgumentError(str(what, ": the bias has the shape [", join(bias.sizes()),
                          "], and the weight has ", outputs, " outputs."));
}

}  // namespace accelerate::detail::quantization
