#include "accelerator/trace_runs.h"

#include <accelerate/accelerate.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <utility>

#include "examples/dice.h"
#include "examples/digits_data.h"
#include "examples/digits_model.h"
#include "examples/gpt_data.h"
#include "examples/gpt_model.h"

namespace accelerate::test {

namespace F = torch::nn::functional;

Json read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return Json::parse(file);
}

std::vector<Json> cases_for(const Json& grid, int ranks) {
  std::vector<Json> result;
  for (const auto& one : grid.at("cases")) {
    const auto wanted = one.value("ranks", std::vector<int>{1, 2});
    if (std::ranges::find(wanted, ranks) != wanted.end()) result.push_back(one);
  }
  return result;
}

// ---- data ---------------------------------------------------------------------------------------

namespace {

examples::GptConfig gpt_config(const Json& grid) {
  const auto& gpt = grid.at("gpt");
  return {.vocab = gpt.at("vocab"),
          .block = gpt.at("block"),
          .layers = gpt.at("layers"),
          .heads = gpt.at("heads"),
          .width = gpt.at("width")};
}

/// Even numbers around 0, or around 1 for the weights of a norm; smaller where more are added up.
std::map<std::string, torch::Tensor> draw_weights(const torch::nn::Module& net,
                                                  std::uint64_t seed) {
  std::map<std::string, torch::Tensor> weights;
  for (const auto& parameter : net.named_parameters()) {
    const auto& shape = parameter.value();
    examples::Dice dice(seed, weights.size());
    const double middle = shape.dim() == 1 && parameter.key().ends_with("weight") ? 1 : 0;
    const auto inputs = static_cast<double>(shape.numel() / shape.size(0));
    const double reach = shape.dim() == 1 ? 0.05 : 1 / std::sqrt(inputs);
    auto values = torch::empty_like(shape, torch::kFloat, at::MemoryFormat::Contiguous).detach();
    auto* const value = values.data_ptr<float>();
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      value[i] = static_cast<float>(middle + dice.uniform(-reach, reach));
    }
    weights.emplace(parameter.key(), values);
  }
  return weights;
}

TraceModel make_gpt_data(const Json& grid) {
  const auto config = gpt_config(grid);
  const std::int64_t samples = grid.at("gpt").at("samples");
  const auto text = examples::make_text(/*count=*/3 * samples, grid.at("seed"));
  const examples::TextWindows windows(text, config.block);
  std::vector<torch::Tensor> inputs;
  std::vector<torch::Tensor> targets;
  for (std::int64_t i = 0; i < samples; ++i) {
    auto [x, y] = windows.get(i);
    inputs.push_back(x);
    targets.push_back(y);
  }
  return {torch::stack(inputs), torch::stack(targets),
          draw_weights(*examples::Gpt(config), grid.at("seed"))};
}

TraceModel make_digits_data(const Json& grid) {
  auto [images, labels] = examples::draw_digits(grid.at("digits").at("samples"), grid.at("seed"));
  return {images, labels, draw_weights(*examples::DigitNet(), grid.at("seed"))};
}

}  // namespace

TraceData::TraceData(const Json& grid) {
  models_.emplace("gpt", make_gpt_data(grid));
  models_.emplace("digits", make_digits_data(grid));
}

void TraceData::save(const std::filesystem::path& path) const {
  const auto dict = [] {
    return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
  };
  auto all = dict();
  for (const auto& [name, model] : models_) {
    auto weights = dict();
    for (const auto& [key, value] : model.weights) weights.insert(key, value);
    auto one = dict();
    one.insert("inputs", model.inputs);
    one.insert("targets", model.targets);
    one.insert("weights", weights);
    all.insert(name, one);
  }
  const auto bytes = torch::pickle_save(all);
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), std::ssize(bytes))) {
    throw std::runtime_error("cannot write " + path.string());
  }
}

// ---- training -----------------------------------------------------------------------------------

namespace {

template <class Net>
Net with_weights(Net net, const TraceModel& data) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->named_parameters()) {
    parameter.value().copy_(data.weights.at(parameter.key()));
  }
  return net;
}

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const Json& one,
                                                        const std::vector<torch::Tensor>& what) {
  const std::string kind = one.at("optimizer");
  const double lr = one.at("lr");
  if (kind == "adamw") {
    return std::make_shared<AdamW>(what, AdamWOptions{.lr = lr, .weight_decay = 0.1});
  }
  if (kind == "torch_adamw") {
    return std::make_shared<torch::optim::AdamW>(what,
                                                 torch::optim::AdamWOptions(lr).weight_decay(0.1));
  }
  if (kind == "sgd") {
    return std::make_shared<SGD>(what, SGDOptions{.lr = lr, .momentum = 0.9, .nesterov = true});
  }
  if (kind == "torch_sgd") {
    return std::make_shared<torch::optim::SGD>(what, torch::optim::SGDOptions(lr).momentum(0.9));
  }
  throw std::runtime_error("no optimizer " + kind);
}

std::shared_ptr<LRScheduler> make_scheduler(const Json& one, torch::optim::Optimizer& optimizer,
                                            std::int64_t moves) {
  const std::string kind = one.value("schedule", "cosine");
  if (kind == "cosine") {
    return std::make_shared<LambdaLR>(
        get_cosine_schedule_with_warmup(optimizer, moves / 10, moves));
  }
  if (kind == "linear") {
    return std::make_shared<LambdaLR>(optimizer, [moves](std::int64_t k) {
      return std::max(0.0, 1 - static_cast<double>(k) / static_cast<double>(moves));
    });
  }
  if (kind == "one_cycle") {
    return std::make_shared<OneCycleLR>(
        optimizer, OneCycleLROptions{.max_lr = one.at("lr").get<double>(), .total_steps = moves});
  }
  throw std::runtime_error("no schedule " + kind);
}

AcceleratorOptions options_of(const Json& grid, const Json& one) {
  AcceleratorState::_reset_state();
  GradientState::_reset_state();
  const bool seedable = one.value("seedable", true);
  DistributedDataParallelKwargs ddp;
  ddp.comm_hook = from_string<DDPCommunicationHookType>(one.value("hook", "no"), "hook");
  const auto hook_options = one.value("hook_options", Json::object());
  for (const auto& [key, value] : hook_options.items()) {
    ddp.comm_state_option.set(key, value.get<std::int64_t>());
  }
  AcceleratorOptions options;
  options.cpu = true;
  options.mixed_precision = from_string<PrecisionType>(one.value("precision", "no"), "precision");
  options.gradient_accumulation_steps = one.value("accumulation", 1);
  options.dataloader_config.split_batches = one.value("split_batches", false);
  options.dataloader_config.use_seedable_sampler = seedable;
  if (seedable) options.dataloader_config.data_seed = grid.at("seed").get<std::int64_t>();
  options.kwargs_handlers = {ddp};
  if (one.contains("fsdp")) {
    options.fsdp_plugin = FullyShardedDataParallelPlugin{
        .fsdp_version = 2,
        .reshard_after_forward = one.at("fsdp").at("reshard").get<bool>(),
        .auto_wrap_policy = AutoWrapPolicy::kTransformerBasedWrap,
        .transformer_cls_names_to_wrap = std::vector<std::string>{"GptBlock"}};
  }
  return options;
}

template <class Net>
Json train(const Json& grid, const Json& one, const TraceModel& data, Net net) {
  Accelerator accelerator(options_of(grid, one));
  auto inputs = data.inputs;
  if (one.value("dtype", "float32") == "float64") {
    net->to(torch::kDouble);
    if (inputs.is_floating_point()) inputs = inputs.to(torch::kDouble);
  }
  const int wanted = grid.at("steps");
  const int moves = wanted * (one.value("split_batches", false) ? 1 : accelerator.num_processes());
  auto inner = make_optimizer(one, net->parameters());
  auto schedule = make_scheduler(one, *inner, moves);
  const std::int64_t batch_size = grid.at(one.at("model").get<std::string>()).at("batch_size");
  auto data_loader = make_data_loader(std::pair{inputs, data.targets},
                                      {.batch_size = batch_size, .shuffle = true});
  set_seed(grid.at("seed"));
  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(net, inner, std::move(data_loader), schedule);

  std::vector<double> losses;
  std::vector<double> rates;
  std::vector<double> norms;
  std::string synced;
  int steps = 0;
  while (steps < wanted) {
    for (auto& [x, y] : loader) {
      const auto accumulating = accelerator.accumulate(model);
      auto scores = model(x).flatten(0, -2);
      if (scores.scalar_type() == torch::kBFloat16) scores = scores.to(torch::kFloat);  // FSDP2
      const auto loss = F::cross_entropy(scores, y.flatten());
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) {
        ++steps;
        if (one.contains("clip_norm")) {
          const auto norm = accelerator.clip_grad_norm_(model.parameters(), one.at("clip_norm"));
          norms.push_back(norm.template item<double>());
        }
        if (one.contains("clip_value")) {
          accelerator.clip_grad_value_(model.parameters(), one.at("clip_value"));
        }
      }
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).template item<double>());
      if (accelerator.sync_gradients()) {
        rates.push_back(optimizer.param_groups()[0].options().get_lr());
      }
      synced += accelerator.sync_gradients() ? '1' : '0';
      if (steps == wanted) break;
    }
  }
  return {{"name", one.at("name")},
          {"ranks", accelerator.num_processes()},
          {"batches", loader.size()},
          {"synced", synced},
          {"losses", losses},
          {"rates", rates},
          {"norms", norms}};
}

}  // namespace

Json run_trace(const Json& grid, const Json& one, const TraceData& data) {
  torch::set_num_threads(1);  // as in Python: the order of additions depends on it
  const std::string kind = one.at("model");
  const auto& model = data.of(kind);
  if (kind == "gpt") {
    return train(grid, one, model, with_weights(examples::Gpt(gpt_config(grid)), model));
  }
  return train(grid, one, model, with_weights(examples::DigitNet(), model));
}

// ---- comparison ---------------------------------------------------------------------------------

namespace {

/// Infinite where the lengths differ; a NaN counts as that.
double largest(const Json& a, const Json& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double result = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i].get<double>() - b[i].get<double>());
    if (std::isnan(difference)) return HUGE_VAL;
    result = std::max(result, difference);
  }
  return result;
}

}  // namespace

TraceDifference compare(const Json& a, const Json& b) {
  return {.loss = largest(a.at("losses"), b.at("losses")),
          .rate = largest(a.at("rates"), b.at("rates")),
          .norm = largest(a.at("norms"), b.at("norms")),
          .course = a.at("batches") != b.at("batches") || a.at("synced") != b.at("synced")};
}

double tolerance_of(const Json& one) {
  if (one.value("precision", "no") == "bf16") return 1e-2;
  return one.value("dtype", "float32") == "float64" ? 1e-10 : 1e-5;
}

double norm_tolerance_of(const Json& one) {
  if (one.value("precision", "no") == "bf16") return 0.1;
  return one.value("dtype", "float32") == "float64" ? 1e-10 : 1e-3;
}

}  // namespace accelerate::test
