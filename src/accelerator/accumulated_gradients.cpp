#include "accelerator/accumulated_gradients.h"

#include <ATen/ATen.h>

#include <functional>

#include "accelerate/torch_archive.h"
#include "checkpoint/state_files.h"
#include "core/text.h"
#include "parallel/engine.h"

namespace accelerate::detail::accelerator {
namespace {

constexpr std::string_view kName = "accumulated_gradients";
/// Beside the names of parameters: how many processes have a part each of one.
constexpr const char* kCut = "cut";

using Visit = std::function<void(const std::string&, at::Tensor&)>;
using VisitParameter =
    std::function<void(const std::string&, at::Tensor&, parallel::Engine* engine)>;

void for_each_parameter(const ObjectRegistry& registry, const VisitParameter& f) {
  for (std::size_t i = 0; i < registry.models.size(); ++i) {
    const auto& model = *registry.models[i];
    for (auto& entry : model.module->named_parameters()) {
      f(str("model_", i, ".", entry.key()), entry.value(), model.engine.get());
    }
  }
}

void for_each_shared_buffer(const ObjectRegistry& registry, const Visit& f) {
  for (std::size_t i = 0; i < registry.models.size(); ++i) {
    if (!registry.models[i]->engine) continue;
    for (auto& entry : registry.models[i]->module->named_buffers()) {
      const auto& buffer = entry.value();
      if (buffer.defined() && !buffer.is_meta())
        f(str("model_", i, ".", entry.key()), entry.value());
    }
  }
}

// An archive has dense tensors only.
Value dense_parts(const at::Tensor& gradient) {
  if (!gradient.is_sparse()) return Value(gradient);
  const auto parts = gradient.coalesce();
  return Value::Dict{{"indices", parts.indices()},
                     {"values", parts.values()},
                     {"size", Value(std::vector<std::int64_t>(parts.sizes().vec()))}};
}

at::Tensor gradient_of(const Value& parts) {
  if (parts.is_tensor()) return parts.as_tensor();
  std::vector<std::int64_t> size;
  for (const auto& one : parts.at("size").items()) size.push_back(one.as_int());
  return at::sparse_coo_tensor(parts.at("indices").as_tensor(), parts.at("values").as_tensor(),
                               size)
      ._coalesced_(true);
}

Value::Dict cut_of(const Value& gradients) {
  const auto* const cut = gradients.as_dict().get(kCut);
  return cut == nullptr ? Value::Dict() : cut->as_dict();
}

/// Whether the parameters of saved gradients were cut as those of the registry are.
bool is_cut_alike(const Value& gradients, const ObjectRegistry& registry) {
  const auto cut = cut_of(gradients);
  bool alike = true;
  for_each_parameter(registry, [&](const auto& name, const at::Tensor& parameter, auto* engine) {
    if (gradients.as_dict().get(name) == nullptr) return;
    const auto* const saved = cut.get(name);
    const auto parts = engine ? engine->parts_of(parameter) : 1;
    alike = alike && parts == (saved == nullptr ? 1 : saved->as_int());
  });
  return alike;
}

}  // namespace

Value AccumulatedGradients::state_dict() {
  Value::Dict gradients;
  if (!accumulating_) return Value(std::move(gradients));
  Value::Dict cut;
  for_each_parameter(registry_, [&](const auto& name, const at::Tensor& parameter, auto* engine) {
    const auto gradient = engine ? engine->accumulated_gradient(parameter) : parameter.grad();
    if (!gradient.defined()) return;
    gradients.set(name, dense_parts(gradient.detach()));
    const auto parts = engine ? engine->parts_of(parameter) : 1;
    if (parts > 1) cut.set(name, parts);
  });
  if (!cut.empty()) gradients.set(kCut, std::move(cut));
  return Value(std::move(gradients));
}

void AccumulatedGradients::load_state_dict(const Value& state) {
  const at::NoGradGuard no_grad;
  for_each_parameter(registry_, [&](const auto& name, const at::Tensor& parameter, auto* engine) {
    at::Tensor gradient;
    if (const auto* parts = state.as_dict().get(name)) {
      gradient = gradient_of(*parts).to(parameter.device());
    }
    if (engine) {
      engine->set_accumulated_gradient(parameter, gradient);
    } else {
      parameter.mutable_grad() = gradient;
    }
  });
}

StateEntry gradients_entry(const ObjectRegistry& registry, bool accumulating) {
  return {.kind = StateKind::kGradients,
          .name = std::string(kName),
          .object = std::make_shared<AccumulatedGradients>(registry, accumulating)};
}

Value gradients_in(const std::filesystem::path& folder, const ObjectRegistry& registry, int rank,
                   int num_processes, std::int64_t saved_by) {
  const auto of_process = [&](int process) -> Value {
    const auto file = folder / checkpoint::state_file_name(
                                   {.kind = StateKind::kGradients, .name = std::string(kName)},
                                   process, /*own=*/true);
    std::error_code error;
    return std::filesystem::exists(file, error) ? torch_load(file) : Value(Value::Dict());
  };
  if (saved_by == num_processes) {
    auto own = of_process(rank);
    if (is_cut_alike(own, registry)) return own;
  }
  Value::Dict sums;
  for (int process = 0; process < saved_by; ++process) {
    const Value part = of_process(process);
    const auto cut = cut_of(part);
    for (const auto& [key, parts] : part.as_dict()) {
      const auto name = key.to_string();
      if (name == kCut) continue;
      // Each part of a parameter comes from one of so many processes only.
      const auto* const count = cut.get(name);
      const auto copies = saved_by / (count == nullptr ? 1 : count->as_int());
      const auto gradient = gradient_of(parts) / static_cast<double>(copies);
      const auto* before = sums.get(name);
      sums.set(name, dense_parts(before ? gradient_of(*before) + gradient : gradient));
    }
  }
  return Value(std::move(sums));
}

Value LocalBuffers::state_dict() {
  Value::Dict buffers;
  if (!saves_) return Value(std::move(buffers));
  for_each_shared_buffer(registry_, [&](const std::string& name, at::Tensor& buffer) {
    buffers.set(name, Value(buffer));
  });
  return Value(std::move(buffers));
}

void LocalBuffers::load_state_dict(const Value& state) {
  const at::NoGradGuard no_grad;
  for_each_shared_buffer(registry_, [&](const std::string& name, at::Tensor& buffer) {
    const auto* saved = state.as_dict().get(name);
    if (saved != nullptr && saved->as_tensor().sizes() == buffer.sizes()) {
      buffer.copy_(saved->as_tensor());
    }
  });
}

StateEntry buffers_entry(const ObjectRegistry& registry, int rank) {
  return {.kind = StateKind::kGradients,
          .name = "buffers",
          .object = std::make_shared<LocalBuffers>(registry, rank != 0)};
}

}  // namespace accelerate::detail::accelerator
