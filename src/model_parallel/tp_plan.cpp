#include "accelerate/parallel/tp_plan.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>

#include "accelerate/errors.h"
#include "accelerate/state/device_mesh.h"
#include "core/text.h"
#include "model_parallel/layer_rules.h"
#include "model_parallel/parameter_part.h"

namespace accelerate {
namespace detail::model_parallel {
namespace {

constexpr auto kWords = std::to_array<std::pair<std::string_view, TpStyle>>({
    {"colwise", TpStyle::kColwise},
    {"colwise_rep", TpStyle::kColwiseRep},
    {"colwise_gather_output", TpStyle::kColwiseRep},
    {"colwise_gather", TpStyle::kColwiseRep},
    {"rowwise", TpStyle::kRowwise},
    {"rowwise_rep", TpStyle::kRowwiseRep},
    {"rowwise_split_input", TpStyle::kRowwiseRep},
    {"embedding_rowwise", TpStyle::kVocab},
    {"vocab", TpStyle::kVocab},
    {"sequence_parallel", TpStyle::kSequenceParallel},
    {"sequence", TpStyle::kSequenceParallel},
    {"replicated_with_grad_allreduce", TpStyle::kSequenceParallel},
    {"replicate", TpStyle::kReplicate},
});

/// '*' stands for any characters but a dot.
bool fits(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*') {
    return !name.empty() && pattern.front() == name.front() &&
           fits(pattern.substr(1), name.substr(1));
  }
  return fits(pattern.substr(1), name) ||
         (!name.empty() && name.front() != '.' && fits(pattern, name.substr(1)));
}

/// A parameter with what is known of it.
struct Planned {
  at::Tensor parameter;
  std::shared_ptr<ParameterPart> part;
  /// Of the weight of a layer.
  std::shared_ptr<WeightRule> rule = nullptr;
};

class Planner {
 public:
  Planner(ProcessGroupPtr group, const TpPlanOptions& options)
      : group_(std::move(group)), options_(options) {}

  void add(const std::string& name, torch::nn::Module& module, const TpRule& rule) {
    if (rule.style == TpStyle::kReplicate) return;
    if (rule.style == TpStyle::kSequenceParallel) return add_summed(name, module);
    if (auto* const linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
      return add_linear(name, *linear, rule);
    }
    if (auto* const embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module)) {
      return add_embedding(name, *embedding, rule);
    }
    throw ArgumentError(
        detail::str("apply_tp_plan: '", name, "', which the rule '", rule.layers, "' is for, is a ",
                    module.name(),
                    ". Linear and Embedding layers can be cut; other modules can be 'replicate' "
                    "or 'sequence_parallel'."));
  }

  /// Collective. Nothing was changed before.
  void carry_out(const torch::nn::Module& model) {
    for (const auto& one : planned_) {
      if (one.part->dim) check_divisible(*one.part);
    }
    std::vector<at::Tensor> values;
    for (const auto& one : model.parameters()) {
      // Each process has its own part of what a layer or an earlier plan has cut.
      const auto known = find_part(one);
      const bool is_cut = known && known->dim;
      if (!one.is_meta() && !is_cut) values.push_back(one);
    }
    for (const auto& one : model.buffers()) {
      if (one.defined() && !one.is_meta()) values.push_back(one);
    }
    broadcast_from_first(values, group_, "apply_tp_plan");
    for (const auto& one : planned_) cut_in_place(one.parameter, one.part);
  }

 private:
  [[nodiscard]] LayerCut cut_of(const std::string& name) const {
    return {.group = group_,
            .name = name,
            .sequence = {.enabled = options_.sequence_parallel, .dim = options_.sequence_dim}};
  }

  /// Empty for one block.
  [[nodiscard]] std::vector<std::int64_t> blocks_of(const std::string& name, const TpRule& rule,
                                                    std::int64_t size) const {
    if (!rule.block_sizes.empty()) {
      const auto sum =
          std::accumulate(rule.block_sizes.begin(), rule.block_sizes.end(), std::int64_t{0});
      if (sum == size) return rule.block_sizes;
      throw ArgumentError(detail::str("apply_tp_plan: the block_sizes of the rule '", rule.layers,
                                      "' add up to ", sum, ", but '", name, "' has ", size,
                                      " outputs."));
    }
    if (rule.blocks == 1) return {};
    if (size % rule.blocks == 0) {
      return std::vector<std::int64_t>(static_cast<std::size_t>(rule.blocks), size / rule.blocks);
    }
    throw ArgumentError(detail::str("apply_tp_plan: '", name, "' has ", size, " outputs in ",
                                    rule.blocks, " blocks, which cannot be divided among ",
                                    group_->getSize(),
                                    " processes. Give block_sizes if blocks differ."));
  }

  Planned& plan_for(const std::string& name, const at::Tensor& parameter,
                    std::optional<std::int64_t> dim, const std::vector<std::int64_t>& blocks = {}) {
    for (auto& one : planned_) {
      if (!one.parameter.is_same(parameter)) continue;
      if (one.part->dim == dim && one.part->blocks == blocks) return one;
      throw ArgumentError(detail::str("apply_tp_plan: '", name, "' and '", one.part->name,
                                      "' are the same parameter, but the plan cuts them in "
                                      "different ways. Cut an embedding by 'embedding_rowwise' and "
                                      "a head that is tied to it by 'colwise_rep'."));
    }
    if (find_part(parameter)) {
      throw ArgumentError(
          detail::str("apply_tp_plan: '", name, "' has been cut before. Leave its layer out."));
    }
    auto part = std::make_shared<ParameterPart>();
    part->group = group_;
    part->name = name;
    part->sizes = parameter.sizes().vec();
    part->dim = dim;
    part->blocks = blocks;
    return planned_.emplace_back(Planned{parameter, std::move(part)});
  }

  void add_weight(const std::string& name, const at::Tensor& weight, std::int64_t dim,
                  const std::vector<std::int64_t>& blocks, WeightUse use, LayerCut cut) {
    auto& planned = plan_for(name + ".weight", weight, dim, blocks);
    if (!planned.rule) {
      auto local = planned.part->sizes;
      local[static_cast<std::size_t>(dim)] /= group_->getSize();
      planned.rule = std::make_shared<WeightRule>(std::move(local), planned.part->sizes[0]);
      planned.part->rule = planned.rule;
    }
    planned.rule->add(use, std::move(cut));
  }

  void add_linear(const std::string& name, const torch::nn::LinearImpl& layer, const TpRule& rule) {
    auto cut = cut_of(name);
    const bool columns = rule.style == TpStyle::kColwise || rule.style == TpStyle::kColwiseRep;
    if (rule.style == TpStyle::kVocab) {
      throw ArgumentError(detail::str("apply_tp_plan: '", name, "' is a Linear, which '",
                                      "embedding_rowwise' is not for. Choose colwise or rowwise."));
    }
    if (columns) {
      cut.gathers = rule.style == TpStyle::kColwiseRep;
      const auto blocks = blocks_of(name, rule, layer.weight.size(0));
      add_weight(name, layer.weight, 0, blocks, WeightUse::kColumns, cut);
      if (layer.bias.defined() && !cut.gathers) {
        plan_for(name + ".bias", layer.bias, 0, blocks);
      }
      return;
    }
    cut.takes_input = rule.style == TpStyle::kRowwiseRep;
    add_weight(name, layer.weight, 1, {}, WeightUse::kRows, cut);
    if (layer.bias.defined() && options_.sequence_parallel) {
      add_summed(name + ".bias", layer.bias, /*of_rows=*/true);
    }
  }

  void add_embedding(const std::string& name, const torch::nn::EmbeddingImpl& layer,
                     const TpRule& rule) {
    if (layer.options.max_norm()) {
      throw ArgumentError(detail::str("apply_tp_plan: the embedding '", name,
                                      "' has a max_norm, which needs whole rows of the weight on "
                                      "each process. Leave it out of the plan."));
    }
    auto cut = cut_of(name);
    const bool columns = rule.style == TpStyle::kColwise || rule.style == TpStyle::kColwiseRep;
    cut.gathers = rule.style == TpStyle::kColwiseRep;
    const auto dim = columns ? 1 : 0;
    add_weight(name, layer.weight, dim, blocks_of(name, rule, layer.weight.size(dim)),
               columns ? WeightUse::kEmbeddingColumns : WeightUse::kVocabulary, cut);
  }

  void add_summed(const std::string& name, torch::nn::Module& module) {
    for (const auto& entry : module.named_parameters()) {
      add_summed(name + "." + entry.key(), entry.value(), /*of_rows=*/false);
    }
  }
  void add_summed(const std::string& name, const at::Tensor& parameter, bool of_rows) {
    auto& planned = plan_for(name, parameter, std::nullopt);
    planned.part->rule = std::make_shared<SummedGradientRule>(group_, name, of_rows);
  }

  ProcessGroupPtr group_;
  TpPlanOptions options_;
  std::vector<Planned> planned_;
};

void check_rule(const TpRule& rule) {
  if (rule.blocks != 1 && !rule.block_sizes.empty()) {
    throw ArgumentError(detail::str("apply_tp_plan: the rule '", rule.layers,
                                    "' has blocks and block_sizes. Give one of them."));
  }
  const bool columns = rule.style == TpStyle::kColwise;
  if ((rule.blocks == 1 && rule.block_sizes.empty()) || (columns && rule.blocks >= 1)) return;
  throw ArgumentError(detail::str("apply_tp_plan: the rule '", rule.layers,
                                  "' has blocks. Only layers of 'colwise' have several."));
}

}  // namespace
}  // namespace detail::model_parallel

TpPlan make_tp_plan(const std::vector<std::pair<std::string, std::string>>& words) {
  using detail::model_parallel::kWords;
  TpPlan plan;
  for (const auto& [layers, word] : words) {
    const auto found = std::ranges::find(kWords, word, [](const auto& one) { return one.first; });
    if (found == kWords.end()) {
      std::vector<std::string_view> names;
      for (const auto& one : kWords) names.push_back(one.first);
      throw ArgumentError(
          detail::str("make_tp_plan: '", word, "' for '", layers,
                      "' is no way to cut a layer. Choose one of: ", detail::join(names), "."));
    }
    plan.push_back({.layers = layers, .style = found->second});
  }
  return plan;
}

void apply_tp_plan(torch::nn::Module& model, const TpPlan& plan,
                   const std::shared_ptr<DeviceMesh>& mesh, const TpPlanOptions& options) {
  using namespace detail::model_parallel;
  if (!mesh || !mesh->has("tp")) return;
  Planner planner(mesh->get_group("tp"), options);
  std::vector<bool> used(plan.size());
  for (const auto& rule : plan) check_rule(rule);
  for (const auto& module : model.named_modules("", /*include_self=*/false)) {
    const auto rule = std::ranges::find_if(
        plan, [&](const TpRule& one) { return fits(one.layers, module.key()); });
    if (rule == plan.end()) continue;
    used[static_cast<std::size_t>(rule - plan.begin())] = true;
    planner.add(module.key(), *module.value(), *rule);
  }
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (used[i]) continue;
    throw ArgumentError(detail::str(
        "apply_tp_plan: no layer is left for the rule '", plan[i].layers,
        "'. Names are those of named_modules(), '*' stands for one part between dots, and a layer "
        "takes the first rule that fits."));
  }
  planner.carry_out(model);
}

}  // namespace accelerate
