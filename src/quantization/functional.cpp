// Tensors to codes and back.
#include "accelerate/quantization/functional.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "accelerate/errors.h"
#include "core/text.h"
#include "formats/quant_state.h"
#include "modeling/torch_dtype.h"
#include "quantization/gpu_kernels.h"
#include "quantization/tensors.h"

namespace accelerate {
namespace detail::quantization {
namespace {

using quant::Int8Weight;
using quant::QuantState;

/// Blocks for one thread at a time.
constexpr std::int64_t kGrainBlocks = 512;

void check_floats(const at::Tensor& tensor, const char* what) {
  const auto dtype = tensor.scalar_type();
  if (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) return;
  throw ArgumentError(str(what, " takes float16, bfloat16 or float32, and the tensor is ",
                          at::toString(dtype), "."));
}

[[noreturn]] void refuse_values(const char* what) {
  throw ArgumentError(str(what,
                          ": the tensor has values that are infinite or NaN, and no code stands "
                          "for them."));
}

at::Tensor host_floats(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, at::kFloat).contiguous();
}

/// `f(first value, count, first block)` for runs of whole blocks, on several threads.
template <class F>
void for_blocks(std::int64_t values, std::int64_t blocksize, const F& f) {
  at::parallel_for(0, blocks_of(values, blocksize), kGrainBlocks,
                   [&](std::int64_t begin, std::int64_t end) {
                     const auto first = begin * blocksize;
                     f(first, std::min(values, end * blocksize) - first, begin);
                   });
}

at::Tensor table_tensor(FourBitType type) {
  const auto& table = table_of(type);
  auto code = at::empty({16}, at::kFloat);
  std::memcpy(code.data_ptr<float>(), table.data(), sizeof table);
  return code;
}

/// ATen adds up fewer values on one thread, and more in an order that depends on the threads.
constexpr std::int64_t kMostInOrder = 32767;

/// The mean for any number of threads.
float mean_of(const at::Tensor& scales) {
  const auto count = scales.numel();
  if (count == 0) return 0;
  if (count <= kMostInOrder) return scales.mean().item<float>();
  double sum = 0;
  for (const auto& part : scales.split(kMostInOrder)) sum += part.sum(at::kDouble).item<double>();
  return static_cast<float>(sum / static_cast<double>(count));
}

/// The values of codes on an accelerator, by operators of ATen.
at::Tensor dequantize_by_operators(const at::Tensor& codes, const at::Tensor& code,
                                   const at::Tensor& absmax, std::int64_t blocksize) {
  const auto scales = absmax.repeat_interleave(blocksize).slice(0, 0, codes.numel());
  return code.index_select(0, codes.flatten().to(at::kInt)).mul_(scales);
}

}  // namespace

FourBitType four_bit_type(std::string_view quant_type) {
  if (quant_type == "nf4") return FourBitType::kNf4;
  if (quant_type == "fp4") return FourBitType::kFp4;
  throw ArgumentError(str("quant_type is '", quant_type, "'. Choose one of: fp4, nf4."));
}

at::Tensor block_scales(const QuantState& state) {
  if (!state.nested()) return state.absmax;
  return quant::dequantize_blockwise(state.absmax, *state.state2).add_(*state.offset);
}

at::Tensor dequantize_4bit(const at::Tensor& packed, const QuantState& state,
                           at::ScalarType dtype) {
  const auto values = c10::multiply_integers(state.shape);
  const auto type = four_bit_type(state.quant_type);
  const auto bytes = packed.view(at::kByte).flatten();
  if (auto expanded = expand_4bit_on_gpu(bytes, state, dtype)) return *std::move(expanded);
  const auto scales = block_scales(state);
  if (!packed.is_cpu()) {
    const auto codes = at::stack({bytes.bitwise_right_shift(4), bytes.bitwise_and(15)}, 1)
                           .flatten()
                           .slice(0, 0, values);
    return dequantize_by_operators(codes, state.code, scales, state.blocksize)
        .view(state.shape)
        .to(dtype);
  }
  auto out = at::empty(state.shape, at::kFloat);
  const auto* const in = bytes.const_data_ptr<std::uint8_t>();
  const auto* const absmax = scales.const_data_ptr<float>();
  auto* const to = out.mutable_data_ptr<float>();
  for_blocks(values, state.blocksize, [&](std::int64_t first, std::int64_t count, std::int64_t) {
    dequantize_4bit(type, in, absmax, state.blocksize, first, count, to + first);
  });
  return out.to(dtype);
}

at::Tensor dequantize_int8(const Int8Weight& weight, at::ScalarType dtype) {
  if (auto expanded = expand_8bit_on_gpu(weight, dtype)) return *std::move(expanded);
  return weight.CB.to(at::kFloat).mul_(weight.SCB.unsqueeze(-1)).mul_(1.0 / 127.0).to(dtype);
}

Int8Weight quantize_rows(const at::Tensor& matrix, double threshold, bool& is_finite) {
  if (auto weight = quantize_rows_on_gpu(matrix, threshold, is_finite)) return *std::move(weight);
  auto values = host_floats(matrix.detach().to(at::kHalf));
  const auto rows = values.size(0);
  const auto columns = values.size(1);
  Int8Weight weight{.CB = at::empty({rows, columns}, at::kChar), .SCB = at::empty({rows})};
  if (threshold > 0) {
    const auto outliers = values.abs().ge(threshold);
    weight.outlier_columns = outliers.any(0).nonzero().flatten();
    if (weight.outlier_columns.numel() > 0) values = values.masked_fill(outliers, 0);
  }
  const auto* const from = values.const_data_ptr<float>();
  auto* const codes = weight.CB.mutable_data_ptr<std::int8_t>();
  auto* const scales = weight.SCB.mutable_data_ptr<float>();
  std::atomic<bool> all_finite = true;
  const auto grain = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, columns));
  at::parallel_for(0, rows, grain, [&](std::int64_t begin, std::int64_t end) {
    bool finite = true;
    for (auto r = begin; r < end; ++r) {
      scales[r] = quantize_row(from + r * columns, columns, codes + r * columns, finite);
    }
    if (!finite) all_finite = false;
  });
  is_finite = all_finite;
  if (threshold > 0 && rows > 1) weight.CB.index_fill_(1, weight.outlier_columns, 0);
  const auto device = matrix.device();
  weight.CB = weight.CB.to(device);
  weight.SCB = weight.SCB.to(device);
  if (threshold > 0) weight.outlier_columns = weight.outlier_columns.to(device);
  return weight;
}

}  // namespace detail::quantization

namespace quant {
namespace {

using detail::str;
using namespace detail::quantization;  // NOLINT(google-build-using-namespace)

/// Packed codes and scales, on the CPU.
std::pair<at::Tensor, at::Tensor> quantize_4bit_on_host(const at::Tensor& tensor, FourBitType type,
                                                        std::int64_t blocksize, bool& is_finite) {
  const auto values = host_floats(tensor);
  const auto count = values.numel();
  auto packed = at::empty({(count + 1) / 2, 1}, at::kByte);
  auto absmax = at::empty({blocks_of(count, blocksize)}, at::kFloat);
  const auto* const from = values.const_data_ptr<float>();
  auto* const bytes = packed.mutable_data_ptr<std::uint8_t>();
  auto* const scales = absmax.mutable_data_ptr<float>();
  std::atomic<bool> all_finite = true;
  for_blocks(count, blocksize, [&](std::int64_t first, std::int64_t size, std::int64_t block) {
    if (!detail::quantization::quantize_4bit(type, from + first, size, blocksize, bytes + first / 2,
                                             scales + block)) {
      all_finite = false;
    }
  });
  is_finite = all_finite;
  return {std::move(packed), std::move(absmax)};
}

/// 0.1 to 1 in `cells` equal parts, as float32: torch.linspace.
at::Tensor cell_means(std::int64_t cells) {
  const auto bounds = at::linspace(0.1, 1, cells + 1, at::kFloat);
  return (bounds.slice(0, 0, -1) + bounds.slice(0, 1)) / 2.0;
}

/// Not shared: files are written without tensors that share memory.
const at::Tensor& dynamic_map() {
  static const auto& map = *new at::Tensor(create_dynamic_map());
  return map;
}

/// Throws for values that no kernel takes. The map of a type is fixed.
void check_values(const QuantState& state, const std::string& name) {
  const auto check = [&](const char* member, const at::Tensor& tensor) {
    if (!tensor.is_floating_point() || tensor.isfinite().all().item<bool>()) return;
    detail::formats::refuse_weight(
        name, str("'", name, ".", member, "' has values that are infinite or NaN"));
  };
  check("absmax", state.absmax);
  if (state.nested()) {
    check("nested_absmax", state.state2->absmax);
    check("nested_quant_map", state.state2->code);
  }
  if (state.code.cpu().allclose(table_tensor(four_bit_type(state.quant_type)), 1e-6, 1e-6)) return;
  detail::formats::refuse_weight(
      name, str("'", name, ".quant_map' has not the values of ", state.quant_type));
}

/// `bytes` are those of the codes, if they are at hand.
QuantState read_state(const StateDict& members, std::optional<std::size_t> bytes,
                      const std::string& name, c10::Device device) {
  detail::formats::QuantTensors facts;
  for (const auto& member : members) {
    facts[member.key()] = {.dtype = detail::modeling::name_of(member.value().scalar_type()),
                           .shape = member.value().sizes().vec()};
  }
  const auto json =
      members[detail::formats::find_quant_state(facts, name)].cpu().contiguous().view(at::kByte);
  const auto text = detail::formats::parse_quant_state(
      {static_cast<const char*>(json.const_data_ptr()), static_cast<std::size_t>(json.numel())},
      name);
  // Other storage types are the same bytes.
  const auto packed =
      bytes ? static_cast<std::int64_t>(*bytes) : (c10::multiply_integers(text.shape) + 1) / 2;
  facts[""] = {.dtype = "uint8", .shape = {packed}};
  detail::formats::check_quant_tensors(text, facts, name);
  const auto take = [&](const char* key) { return members[key].flatten().to(device); };
  QuantState state{.absmax = take("absmax"),
                   .shape = text.shape,
                   .code = take("quant_map"),
                   .dtype = *detail::modeling::dtype_of(text.dtype),
                   .blocksize = text.blocksize,
                   .quant_type = text.quant_type};
  if (text.nested) {
    state.offset = static_cast<float>(text.nested->offset);
    state.state2 =
        std::make_shared<const QuantState>(QuantState{.absmax = take("nested_absmax"),
                                                      .code = take("nested_quant_map"),
                                                      .dtype = at::kFloat,
                                                      .blocksize = text.nested->blocksize});
  }
  check_values(state, name);
  return state;
}

}  // namespace

std::pair<at::Tensor, QuantState> quantize_4bit(const at::Tensor& tensor,
                                                const Quantize4bitOptions& options) {
  check_floats(tensor, "quantize_4bit");
  check_blocksize(options.blocksize, 32, "quantize_4bit");
  const auto type = four_bit_type(options.quant_type);
  const auto count = tensor.numel();
  if ((count + 1) / 2 % static_cast<std::int64_t>(c10::elementSize(options.quant_storage)) != 0) {
    throw ArgumentError(str("quantize_4bit: ", (count + 1) / 2,
                            " bytes of codes are no whole number of elements of quant_storage, ",
                            at::toString(options.quant_storage), ". Choose Byte."));
  }
  bool is_finite = true;
  auto coded = quantize_4bit_on_gpu(tensor, type, options.blocksize, is_finite);
  if (!coded) coded = quantize_4bit_on_host(tensor, type, options.blocksize, is_finite);
  auto [packed, absmax] = *std::move(coded);
  if (!is_finite) refuse_values("quantize_4bit");
  const auto device = tensor.device();
  QuantState state{.shape = tensor.sizes().vec(),
                   .code = table_tensor(type).to(device),
                   .dtype = tensor.scalar_type(),
                   .blocksize = options.blocksize,
                   .quant_type = options.quant_type};
  if (options.compress_statistics) {
    // The mean on the host: its bits depend on the order of additions.
    absmax = absmax.cpu();
    state.offset = mean_of(absmax);
    auto [codes, nested] = quantize_blockwise(absmax - *state.offset, {.blocksize = 256});
    nested.absmax = nested.absmax.to(device);
    nested.code = nested.code.to(device);
    state.state2 = std::make_shared<const QuantState>(std::move(nested));
    absmax = std::move(codes);
  }
  state.absmax = absmax.to(device);
  packed = packed.flatten().view(options.quant_storage).unsqueeze(1);
  return {packed.to(device), std::move(state)};
}

at::Tensor dequantize_4bit(const at::Tensor& packed, const QuantState& state) {
  const auto [bytes, fitting] = checked("dequantize_4bit", packed, state);
  return detail::quantization::dequantize_4bit(bytes, fitting, state.dtype);
}

std::pair<at::Tensor, QuantState> quantize_blockwise(const at::Tensor& tensor,
                                                     const QuantizeBlockwiseOptions& options) {
  check_floats(tensor, "quantize_blockwise");
  check_blocksize(options.blocksize, 64, "quantize_blockwise");
  const auto map = host_floats(options.code.value_or(dynamic_map()));
  if (map.numel() != 256) {
    throw ArgumentError(
        str("quantize_blockwise: code has ", map.numel(), " values, and 256 are expected."));
  }
  const auto values = host_floats(tensor);
  const auto count = values.numel();
  auto codes = at::empty(tensor.sizes(), at::kByte);
  auto absmax = at::empty({blocks_of(count, options.blocksize)}, at::kFloat);
  const auto* const from = values.const_data_ptr<float>();
  const auto* const entries = map.const_data_ptr<float>();
  auto* const to = codes.mutable_data_ptr<std::uint8_t>();
  auto* const scales = absmax.mutable_data_ptr<float>();
  std::atomic<bool> all_finite = true;
  for_blocks(
      count, options.blocksize, [&](std::int64_t first, std::int64_t size, std::int64_t block) {
        if (!detail::quantization::quantize_blockwise(
                entries, from + first, size, options.blocksize, to + first, scales + block)) {
          all_finite = false;
        }
      });
  if (!all_finite) refuse_values("quantize_blockwise");
  const auto device = tensor.device();
  QuantState state{.shape = tensor.sizes().vec(),
                   .code = map.to(device, map.scalar_type(), false, /*copy=*/true),
                   .dtype = tensor.scalar_type(),
                   .blocksize = options.blocksize};
  if (options.nested) {
    state.offset = mean_of(absmax);
    auto [nested_codes, nested] =
        quantize_blockwise(absmax.sub_(*state.offset), {.blocksize = options.blocksize});
    state.state2 = std::make_shared<const QuantState>(std::move(nested));
    absmax = std::move(nested_codes);
  }
  state.absmax = absmax.to(device);
  return {codes.to(device), std::move(state)};
}

at::Tensor dequantize_blockwise(const at::Tensor& codes, const QuantState& given) {
  const auto count = codes.numel();
  if (codes.scalar_type() != at::kByte) {
    throw ArgumentError(str("dequantize_blockwise takes codes of Byte, and they are ",
                            at::toString(codes.scalar_type()), "."));
  }
  const auto state = checked_scales("dequantize_blockwise", given, count, 256, codes.device());
  const auto scales = block_scales(state);
  if (!codes.is_cpu()) {
    return dequantize_by_operators(codes, state.code, scales, state.blocksize)
        .view(codes.sizes())
        .to(state.dtype);
  }
  const auto from = codes.contiguous();
  auto out = at::empty(codes.sizes(), at::kFloat);
  const auto* const in = from.const_data_ptr<std::uint8_t>();
  const auto* const map = state.code.const_data_ptr<float>();
  const auto* const absmax = scales.const_data_ptr<float>();
  auto* const to = out.mutable_data_ptr<float>();
  for_blocks(count, state.blocksize,
             [&](std::int64_t first, std::int64_t size, std::int64_t block) {
               detail::quantization::dequantize_blockwise(map, in + first, absmax + block,
                                                          state.blocksize, size, to + first);
             });
  return out.to(state.dtype);
}

at::Tensor create_dynamic_map() {
  std::vector<at::Tensor> parts;
  for (int i = 0; i < 7; ++i) {
    const auto means = cell_means(std::int64_t{1} << i);
    const double scale = std::pow(10.0, i - 6);
    parts.push_back(means * scale);
    parts.push_back(means * -scale);
  }
  parts.push_back(at::tensor({0.0F, 1.0F}));
  return std::get<0>(at::cat(parts).sort());
}

Int8Weight int8_vectorwise_quant(const at::Tensor& matrix, double threshold) {
  check_floats(matrix, "int8_vectorwise_quant");
  if (matrix.dim() != 2 || !(threshold >= 0)) {
    throw ArgumentError(
        str("int8_vectorwise_quant takes a matrix and a threshold of 0 or more, not "
            "a tensor of ",
            matrix.dim(), " dimensions and ", threshold, "."));
  }
  bool is_finite = true;
  auto weight = quantize_rows(matrix, threshold, is_finite);
  if (!is_finite) refuse_values("int8_vectorwise_quant");
  return weight;
}

at::Tensor int8_vectorwise_dequant(const Int8Weight& weight) {
  return dequantize_int8(checked("int8_vectorwise_dequant", weight), at::kFloat);
}

StateDict as_dict(const QuantState& state) {
  detail::formats::QuantStateText text{.quant_type = state.quant_type,
                                       .blocksize = state.blocksize,
                                       .dtype = detail::modeling::name_of(state.dtype),
                                       .shape = state.shape};
  StateDict members("Tensor");
  members.insert("absmax", state.absmax);
  members.insert("quant_map", state.code);
  if (state.nested()) {
    text.nested = {.blocksize = state.state2->blocksize,
                   .dtype = detail::modeling::name_of(state.state2->dtype),
                   .offset = static_cast<double>(*state.offset)};
    members.insert("nested_absmax", state.state2->absmax);
    members.insert("nested_quant_map", state.state2->code);
  }
  const auto bytes = detail::formats::write_quant_state(text);
  auto tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  members.insert(str(detail::formats::kQuantStateName, state.quant_type), tensor);
  return members;
}

QuantState from_dict(const StateDict& members, const at::Tensor& packed, const std::string& name,
                     c10::Device device) {
  return read_state(members, packed.nbytes(), name, device);
}

QuantState from_dict(const StateDict& members, c10::Device device) {
  // bitsandbytes gives its modules names like these, too.
  std::string prefix;
  for (const auto& member : members) {
    const auto at = member.key().find(detail::formats::kQuantStateName);
    if (at != std::string::npos && at > 0 && member.key()[at - 1] == '.') {
      prefix = member.key().substr(0, at);
    }
  }
  StateDict stripped("Tensor");
  for (const auto& member : members) {
    const auto& key = member.key();
    stripped.insert(key.starts_with(prefix) ? key.substr(prefix.size()) : key, member.value());
  }
  const auto name = prefix.empty() ? "weight" : prefix.substr(0, prefix.size() - 1);
  return read_state(stripped, std::nullopt, name, device);
}

}  // namespace quant
}  // namespace accelerate
