#include "quantization/packed_weight.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "formats/quant_state.h"
#include "lazy/operator_arguments.h"
#include "lazy/operator_rule.h"
#include "lazy/released_storage.h"
#include "lazy/trigger.h"
#include "modeling/tensors.h"
#include "modeling/torch_dtype.h"

namespace accelerate::detail::quantization {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using quant::Int8Weight;
using quant::QuantState;

/// "fc.SCB" for "fc.weight".
std::string beside(const std::string& weight, const char* name) {
  const auto dot = weight.rfind('.');
  return str(dot == weight.npos ? "" : std::string_view(weight).substr(0, dot + 1), name);
}

bool is_number(const c10::IValue& value, double number) {
  return value.isScalar() && value.toScalar().toDouble() == number;
}

/// Kernels add one number for each output, or one for all.
bool is_bias(const at::Tensor& tensor, std::int64_t outputs) {
  return !tensor.defined() ||
         (tensor.dim() <= 1 && (tensor.numel() == 1 || tensor.numel() == outputs));
}

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

/// The values of the elements that a view of a packed parameter refers to.
at::Tensor value_of(const at::Tensor& view, const PackedWeight& weight) {
  return weight.values(view.scalar_type())
      .as_strided(view.sizes(), view.strides(), view.storage_offset());
}

/// The storage of a parameter owns its packed weight. This is what the registry of rules has.
class WeakRule final : public lazy::OperatorRule {
 public:
  explicit WeakRule(std::weak_ptr<PackedWeight> weight) : weight_(std::move(weight)) {}
  bool reads_bytes() const override { return false; }
  bool takes_lists() const override { return true; }
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::size_t argument) override {
    const auto weight = weight_.lock();
    return weight != nullptr && weight->run(op, stack, argument);
  }

 private:
  std::weak_ptr<PackedWeight> weight_;
};

c10::DataPtr owner_of(std::shared_ptr<PackedWeight> weight, c10::Device device) {
  using Owner = std::shared_ptr<PackedWeight>;
  return {nullptr, new Owner(std::move(weight)),
          [](void* owner) { delete static_cast<Owner*>(owner); }, device};
}

/// The argument with values in place of packed parameters.
c10::IValue with_values(const c10::IValue& argument) {
  const auto value = [](const at::Tensor& tensor) {
    const auto packed = find_packed(tensor);
    return packed ? value_of(tensor, *packed) : tensor;
  };
  if (argument.isTensor()) return value(argument.toTensor());
  if (argument.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : argument.toTensorList()) list.push_back(value(tensor));
    return list;
  }
  return argument;
}

}  // namespace

at::ScalarType scalar_type(FloatType type) {
  switch (type) {
    case FloatType::kFp32:
      return at::kFloat;
    case FloatType::kFp16:
      return at::kHalf;
    case FloatType::kBf16:
      return at::kBFloat16;
  }
  return at::kFloat;
}

/// Keeps the bytes of codes and scales where they are used, if a store manages them, and those of
/// the other arguments of an operator.
class PackedWeight::Pinned {
 public:
  explicit Pinned(const PackedWeight& weight) {
    weight.check_loaded();
    try {
      if (const auto* four = std::get_if<FourBit>(&weight.weight_)) {
        for (const auto* part : {&four->packed, &four->state.absmax})
          pin(*part, lazy::Access::kRead);
      } else if (const auto* eight = std::get_if<Int8Weight>(&weight.weight_)) {
        for (const auto* part : {&eight->CB, &eight->SCB}) pin(*part, lazy::Access::kRead);
      }
    } catch (...) {
      unpin();
      throw;
    }
  }
  Pinned(const PackedWeight& weight, const c10::FunctionSchema& schema, Arguments arguments)
      : Pinned(weight) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      lazy::for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        pin(tensor, writes ? lazy::Access::kWrite : lazy::Access::kRead);
      });
    }
  }
  ~Pinned() { unpin(); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  void pin(const at::Tensor& tensor, lazy::Access access) {
    auto managed = lazy::find_managed(tensor);
    if (managed == nullptr) return;
    managed->pin(access);
    pinned_.push_back(std::move(managed));
  }
  void unpin() noexcept {
    for (const auto& managed : pinned_) managed->unpin();
  }

  /// Operators on the codes need no further look at the store.
  c10::impl::ExcludeDispatchKeyGuard no_trigger_{lazy::kLazyKey};
  std::vector<std::shared_ptr<lazy::ManagedStorage>> pinned_;
};

PackedWeight::PackedWeight(std::string name, std::int64_t outputs, std::int64_t inputs,
                           at::ScalarType dtype, const BnbQuantizationConfig& config)
    : name_(std::move(name)), outputs_(outputs), inputs_(inputs), dtype_(dtype), config_(config) {}

void PackedWeight::attach(torch::nn::LinearImpl& layer, const std::string& name,
                          at::ScalarType dtype, const BnbQuantizationConfig& config) {
  const at::NoGradGuard no_grad;
  const auto parameter = layer.weight;
  auto weight =
      std::make_shared<PackedWeight>(name, parameter.size(0), parameter.size(1), dtype, config);
  if (!parameter.is_meta()) weight->quantize(parameter.detach());
  parameter.set_requires_grad(false);
  if (layer.bias.defined()) layer.bias.set_requires_grad(false);
  parameter.mutable_grad().reset();
  weight->parameter_.emplace(parameter.getIntrusivePtr());
  weight->bind(parameter, parameter.is_meta() ? c10::Device(c10::kCPU) : parameter.device());
}

/// Gives the parameter a storage without bytes, and makes this what operators and state
/// dictionaries see of it.
void PackedWeight::bind(const at::Tensor& parameter, c10::Device device) {
  const c10::impl::ExcludeDispatchKeyGuard no_trigger(lazy::kLazyKey);
  const auto bytes = static_cast<std::size_t>(outputs_ * inputs_) * c10::elementSize(dtype_);
  const auto storage = lazy::make_empty_storage(bytes, device);
  const auto data = at::empty({0}, at::TensorOptions(dtype_).device(device))
                        .set_(c10::Storage(storage), 0, {outputs_, inputs_}, {inputs_, 1});
  lazy::forbid(*storage, str("The weight '", name_, "' is kept in ", is_4bit() ? 4 : 8,
                             " bits: its bytes cannot be touched. Read its values by an operator, "
                             "for example ",
                             name_, ".clone()."));
  storage->set_data_ptr_noswap(owner_of(shared_from_this(), device));
  modeling::replace_data(parameter, data, name_);
  lazy::set_rule(parameter, std::make_shared<WeakRule>(weak_from_this()));
  modeling::set_stand_in(parameter, shared_from_this());
}

at::Tensor PackedWeight::parameter() const {
  auto tensor = parameter_ ? parameter_->lock() : nullptr;
  return tensor ? at::Tensor(std::move(tensor)) : at::Tensor();
}

void PackedWeight::check_loaded() const {
  if (weight_.index() != 0) return;
  throw StateError(str("The weight '", name_,
                       "' has no value: the model was built without weights, and the checkpoint "
                       "that was loaded does not have it."));
}

// -- values ---------------------------------------------------------------------------------------

void PackedWeight::quantize(const at::Tensor& value) {
  if (value.sizes() != at::IntArrayRef({outputs_, inputs_})) {
    throw StateDictMismatch(str("The weight '", name_, "' has the shape [", join(value.sizes()),
                                "] in the checkpoint, and [", outputs_, ", ", inputs_,
                                "] in the model."));
  }
  try {
    const auto rounded = value.to(dtype_);
    if (!is_4bit()) {
      weight_ = quant::int8_vectorwise_quant(rounded);
      return;
    }
    auto [packed, state] =
        quant::quantize_4bit(rounded, {.compress_statistics = config_.bnb_4bit_use_double_quant,
                                       .quant_type = config_.bnb_4bit_quant_type});
    auto text = quant::as_dict(state)[str(formats::kQuantStateName, state.quant_type)];
    weight_ = FourBit{std::move(packed), std::move(state), std::move(text)};
  } catch (const ArgumentError& error) {
    throw ArgumentError(str("The layer '", name_, "' cannot be quantized. ", error.what(),
                            " Add it to skip_modules, or repair its weights."));
  }
}

at::Tensor PackedWeight::values(at::ScalarType dtype) const {
  const Pinned pinned(*this);
  if (const auto* four = std::get_if<FourBit>(&weight_)) {
    return dequantize_4bit(four->packed, four->state, dtype);
  }
  return dequantize_int8(std::get<Int8Weight>(weight_), dtype);
}

at::Tensor PackedWeight::forward(const at::Tensor& rows, const at::Tensor& bias) const {
  const Pinned pinned(*this);
  if (const auto* four = std::get_if<FourBit>(&weight_)) {
    return product_4bit(rows, four->packed, four->state, bias);
  }
  return product_int8(rows, std::get<Int8Weight>(weight_), bias, config_.llm_int8_threshold);
}

at::Tensor PackedWeight::backward(const at::Tensor& gradient) const {
  const Pinned pinned(*this);
  if (const auto* four = std::get_if<FourBit>(&weight_)) {
    return backward_4bit(gradient, four->packed, four->state);
  }
  return backward_int8(gradient, std::get<Int8Weight>(weight_));
}

// -- operators ------------------------------------------------------------------------------------

at::Tensor PackedWeight::product(const at::Tensor& x, const at::Tensor& bias) {
  const auto of = parameter();
  const auto input = of.defined() ? x.to(of.device()) : x;
  if (!is_4bit()) {
    const auto added = bias.defined() ? bias.to(x.scalar_type()) : bias;
    return differentiable_product(shared_from_this(), input, added);
  }
  const auto compute = scalar_type(config_.bnb_4bit_compute_dtype);
  const auto added = bias.defined() ? bias.to(compute) : bias;
  return differentiable_product(shared_from_this(), input.to(compute), added).to(x.scalar_type());
}

/// The result, if the operator is a product with the whole weight.
std::optional<at::Tensor> PackedWeight::product_of(const c10::OperatorHandle& op,
                                                   Arguments arguments, std::size_t argument) {
  const auto& name = op.schema().name();
  const auto& view = arguments[argument].toTensor();
  if (view.dim() != 2 || view.storage_offset() != 0) return std::nullopt;
  const bool is_whole =
      view.sizes() == at::IntArrayRef({outputs_, inputs_}) && view.stride(0) == inputs_;
  const bool is_transposed = view.sizes() == at::IntArrayRef({inputs_, outputs_}) &&
                             view.stride(1) == inputs_ && view.stride(0) == 1;
  if (name == "aten::linear" && argument == 1 && is_whole) {
    const auto bias = tensor_or_none(arguments[2]);
    if (!is_bias(bias, outputs_)) return std::nullopt;
    return product(arguments[0].toTensor(), bias);
  }
  if ((name == "aten::matmul" || name == "aten::mm") && argument == 1 && is_transposed) {
    return product(arguments[0].toTensor(), {});
  }
  if (name == "aten::addmm" && op.schema().overload_name().empty() && argument == 2 &&
      is_transposed && is_number(arguments[3], 1) && is_number(arguments[4], 1) &&
      is_bias(arguments[0].toTensor(), outputs_)) {
    return product(arguments[1].toTensor(), arguments[0].toTensor());
  }
  return std::nullopt;
}

bool PackedWeight::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                       std::size_t argument) {
  const auto count = op.schema().arguments().size();
  const auto begin = stack.size() - count;
  const Arguments arguments(stack.data() + begin, count);
  const auto& name = op.schema().name();
  const auto* alias = op.schema().arguments()[argument].alias_info();
  const bool takes_other_data = name == "aten::_has_compatible_shallow_copy_type" &&
                                arguments[1].toTensor().storage().unsafeGetStorageImpl() !=
                                    arguments[0].toTensor().storage().unsafeGetStorageImpl();
  if (name == "aten::_has_compatible_shallow_copy_type" && !takes_other_data) return false;
  if (takes_other_data || (alias != nullptr && alias->isWrite())) {
    throw StateError(
        str("The weight '", name_, "' is kept in ", is_4bit() ? 4 : 8,
            " bits and cannot be moved, converted or written to. Choose its device by "
            "the device_map of load_and_quantize_model; train adapters instead of it."));
  }
  const Pinned pinned(*this, op.schema(), arguments);
  if (arguments[argument].isTensor()) {
    if (auto result = product_of(op, arguments, argument)) {
      stack.resize(begin);
      stack.emplace_back(std::move(*result));
      return true;
    }
  }
  for (auto i = begin; i < stack.size(); ++i) stack[i] = with_values(stack[i]);
  op.callBoxed(stack);
  return true;
}

// -- state dictionaries ---------------------------------------------------------------------------

bool PackedWeight::owns(std::string_view key, const std::string& name) const {
  return key == name || (key.starts_with(name) && key[name.size()] == '.') ||
         key == beside(name, "SCB") || key == beside(name, "weight_format");
}

StateDict PackedWeight::placed(const std::string& name) const {
  StateDict large("Tensor");
  if (const auto* four = std::get_if<FourBit>(&weight_)) {
    large.insert(name, four->packed);
    large.insert(name + ".absmax", four->state.absmax);
  } else if (const auto* eight = std::get_if<Int8Weight>(&weight_)) {
    large.insert(name, eight->CB);
    large.insert(beside(name, "SCB"), eight->SCB);
  }
  return large;
}

StateDict PackedWeight::state(const std::string& name) const {
  StateDict all("Tensor");
  if (const auto* four = std::get_if<FourBit>(&weight_)) {
    all.insert(name, four->packed);
    const auto add = [&](std::string_view member, const at::Tensor& tensor) {
      all.insert(str(name, ".", member), tensor);
    };
    add("absmax", four->state.absmax);
    add("quant_map", four->state.code);
    if (four->state.nested()) {
      add("nested_absmax", four->state.state2->absmax);
      add("nested_quant_map", four->state.state2->code);
    }
    add(str(formats::kQuantStateName, four->state.quant_type), four->text);
  } else if (const auto* eight = std::get_if<Int8Weight>(&weight_)) {
    all.insert(name, eight->CB);
    all.insert(beside(name, "SCB"), eight->SCB);
    all.insert(beside(name, "weight_format"), at::zeros({}, at::kByte));
  } else {
    all.insert(name, parameter());
  }
  return all;
}

void PackedWeight::load_4bit(const std::string& name, const StateDict& state) {
  const auto& packed = state[name];
  StateDict members("Tensor");
  for (const auto& part : state) {
    if (part.key() == name) continue;
    if (!part.key().starts_with(name + ".")) {
      throw FormatError(str("The weight '", name, "' is in 4 bits in the file, and the file has '",
                            part.key(), "', which belongs to 8 bits."),
                        name);
    }
    members.insert(part.key().substr(name.size() + 1), part.value());
  }
  auto read = quant::from_dict(members, packed, name);
  if (read.shape != std::vector{outputs_, inputs_}) {
    throw StateDictMismatch(str("The weight '", name, "' has the shape [", join(read.shape),
                                "] in the checkpoint, and [", outputs_, ", ", inputs_,
                                "] in the model."));
  }
  auto text = members[str(formats::kQuantStateName, read.quant_type)];
  auto bytes = packed.contiguous().flatten().view(at::kByte).unsqueeze(1);
  weight_ = FourBit{std::move(bytes), std::move(read), std::move(text)};
}

void PackedWeight::load_8bit(const std::string& name, const StateDict& state) {
  formats::QuantTensors facts;
  for (const auto& part : state) {
    facts[part.key()] = {.dtype = modeling::name_of(part.value().scalar_type()),
                         .shape = part.value().sizes().vec()};
  }
  std::optional<std::int64_t> format;
  if (const auto* tensor = state.find(beside(name, "weight_format"))) {
    format = tensor->numel() == 1 ? tensor->item<std::int64_t>() : -1;
  }
  formats::check_int8_tensors({outputs_, inputs_}, format, facts, name);
  const auto& scales = state[beside(name, "SCB")];
  if (!scales.isfinite().all().item<bool>()) {
    formats::refuse_weight(name, "its SCB has values that are infinite or NaN");
  }
  weight_ = Int8Weight{.CB = state[name].contiguous(), .SCB = scales.flatten()};
}

void PackedWeight::load(const std::string& name, const StateDict& state) {
  const at::NoGradGuard no_grad;
  const auto before = weight_;
  adopt(name, state);
  keep_tensors(before);
}

void PackedWeight::keep_tensors(const Weight& before) {
  const auto keep = [](at::Tensor& now, const at::Tensor& then) {
    if (now.is_same(then) || now.scalar_type() != then.scalar_type() ||
        now.sizes() != then.sizes() || now.device() != then.device()) {
      return;
    }
    now = then.copy_(now);
  };
  if (auto* four = std::get_if<FourBit>(&weight_)) {
    if (const auto* old = std::get_if<FourBit>(&before)) {
      keep(four->packed, old->packed);
      keep(four->state.absmax, old->state.absmax);
    }
  } else if (auto* eight = std::get_if<Int8Weight>(&weight_)) {
    if (const auto* old = std::get_if<Int8Weight>(&before)) {
      keep(eight->CB, old->CB);
      keep(eight->SCB, old->SCB);
    }
  }
}

void PackedWeight::adopt(const std::string& name, const StateDict& state) {
  const at::NoGradGuard no_grad;
  for (const auto& item : placed(name)) {
    if (lazy::find_managed(item.value()) == nullptr) continue;
    throw StateError(str("The weight '", name,
                         "' is offloaded. Call remove_hooks() of the dispatched model before other "
                         "values are loaded."));
  }
  const auto& value = state[name];
  if (value.is_floating_point() && state.size() == 1) {
    quantize(value);
  } else if (value.scalar_type() == at::kChar && !is_4bit()) {
    load_8bit(name, state);
  } else if (is_4bit() && value.scalar_type() != at::kChar) {
    load_4bit(name, state);
  } else {
    throw FormatError(str("The weight '", name, "' is ", at::toString(value.scalar_type()),
                          " in the file, and the model keeps it in ", is_4bit() ? 4 : 8,
                          " bits. Load it with the configuration that it was saved with."),
                      name);
  }
  if (const auto of = parameter(); of.defined()) move_to(of.device());
}

void PackedWeight::move_to(c10::Device device) {
  const auto of = parameter();
  const auto move = [&](at::Tensor& tensor) {
    if (lazy::find_managed(tensor) == nullptr) tensor = tensor.to(device);
  };
  if (auto* four = std::get_if<FourBit>(&weight_)) {
    auto& state = four->state;
    for (auto* tensor : {&four->packed, &state.absmax, &state.code}) move(*tensor);
    if (state.nested() && state.state2->absmax.device() != device) {
      auto nested = *state.state2;
      for (auto* tensor : {&nested.absmax, &nested.code}) move(*tensor);
      state.state2 = std::make_shared<const QuantState>(std::move(nested));
    }
  } else if (auto* eight = std::get_if<Int8Weight>(&weight_)) {
    for (auto* tensor : {&eight->CB, &eight->SCB}) move(*tensor);
  }
  if (of.defined() && of.device() != device) bind(of, device);
}

std::shared_ptr<PackedWeight> find_packed(const at::Tensor& parameter) {
  return std::dynamic_pointer_cast<PackedWeight>(modeling::find_stand_in(parameter));
}

}  // namespace accelerate::detail::quantization
