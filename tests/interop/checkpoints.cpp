// Our side of checkpoints.sh: what checkpoints.py does, call by call.
//
//     interop_checkpoints run CASES WORK CHAIN FROM BEGIN END
//
// trains each case from step BEGIN, which it loads from the folder of the chain FROM unless it is
// 0, to step END, saves every 20 steps, and writes WORK/CHAIN.<processes>.json.
#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/trace_runs.h"

namespace {

using namespace accelerate;
namespace fs = std::filesystem;
using test::Json;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double dropout) : drop(dropout) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("drop", drop);
    register_module("second", second);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(drop(torch::relu(norm(first(x))))).flatten();
  }
  // Behind a norm the gradient of a bias would be noise, which Adam blows up.
  torch::nn::Linear first{torch::nn::LinearOptions(6, 8).bias(false)};
  torch::nn::Linear second{8, 1};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Dropout drop;
};
TORCH_MODULE(Net);

/// Values that any program can make, between -1 and 1.
torch::Tensor wave(std::int64_t count, double begin) {
  return torch::sin(torch::arange(count, torch::kDouble) * 0.7 + begin);
}

Net make_net(double dropout, int number) {
  Net net(dropout);
  const torch::NoGradGuard no_grad;
  int index = 10 * number;
  for (auto& parameter : net->named_parameters()) {
    auto& tensor = parameter.value();
    const double middle = parameter.key() == "norm.weight" ? 1 : 0;
    tensor.copy_((wave(tensor.numel(), index++) * 0.3 + middle).view(tensor.sizes()));
  }
  return net;
}

// ---- objects of the program ---------------------------------------------------------------------

struct Progress {
  [[nodiscard]] Value state_dict() const {
    return Value::Dict{{"batches", batches}, {"steps", steps}, {"note", "where it is"}};
  }
  void load_state_dict(const Value& state) {
    batches = state.at("batches").as_int();
    steps = state.at("steps").as_int();
  }
  std::int64_t batches = 0;
  std::int64_t steps = 0;
};

/// A tensor and a list.
struct History {
  [[nodiscard]] Value state_dict() const {
    Value::List list;
    for (const double loss : last) list.emplace_back(loss);
    return Value::Dict{{"mean", mean}, {"last", std::move(list)}};
  }
  void load_state_dict(const Value& state) {
    mean = state.at("mean").as_tensor().clone();
    last.clear();
    for (const auto& loss : state.at("last").items()) last.push_back(loss.as_double());
  }
  void add(double loss) {
    mean = mean * 0.9 + loss * 0.1;
    last.push_back(loss);
    if (last.size() > 3) last.erase(last.begin());
  }
  torch::Tensor mean = torch::zeros({1}, torch::kDouble);
  std::vector<double> last;
};

// ---- one case -----------------------------------------------------------------------------------

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind, double lr,
                                                        const std::vector<torch::Tensor>& what) {
  if (kind == "adamw") return std::make_shared<AdamW>(what, AdamWOptions{.lr = lr});
  if (kind == "torch_adamw") {
    return std::make_shared<torch::optim::AdamW>(what, torch::optim::AdamWOptions(lr));
  }
  if (kind == "sgd") return std::make_shared<SGD>(what, SGDOptions{.lr = lr, .momentum = 0.9});
  return std::make_shared<torch::optim::SGD>(what, torch::optim::SGDOptions(lr).momentum(0.9));
}

std::shared_ptr<LRScheduler> make_scheduler(const std::string& kind,
                                            torch::optim::Optimizer& optimizer) {
  if (kind == "cosine") {
    return std::make_shared<CosineAnnealingLR>(optimizer, CosineAnnealingLROptions{.t_max = 150});
  }
  return std::make_shared<StepLR>(optimizer, StepLROptions{.step_size = 15, .gamma = 0.7});
}

AcceleratorOptions options_of(const Json& grid, const Json& one) {
  AcceleratorState::_reset_state();
  GradientState::_reset_state();
  AcceleratorOptions options;
  options.cpu = true;
  options.gradient_accumulation_steps = one.value("accumulation", 1);
  auto& data = options.dataloader_config;
  data.use_seedable_sampler = one.value("seedable", true);
  if (data.use_seedable_sampler) data.data_seed = grid.at("seed").get<std::int64_t>();
  data.use_stateful_dataloader = one.value("stateful", false);
  return options;
}

/// Numbers of the three generators, of all processes.
Json draw(Accelerator& accelerator) {
  std::vector<std::int64_t> drawn;
  for (int i = 0; i < 2; ++i) drawn.push_back(host_rng()());
  for (int i = 0; i < 2; ++i) drawn.push_back(numpy_rng()());
  const auto torch_numbers = torch::randint(0, std::int64_t{1} << 31, {2}, torch::kLong);
  const auto all = accelerator.gather(torch::cat({torch::tensor(drawn), torch_numbers}));
  return std::vector<std::int64_t>(all.const_data_ptr<std::int64_t>(),
                                   all.const_data_ptr<std::int64_t>() + all.numel());
}

class CaseRun {
 public:
  CaseRun(const Json& grid, const Json& one)
      : one_(one), every_(grid.at("every")), accelerator_(options_of(grid, one)) {
    const double lr = one.at("lr");
    for (const std::string kind : one.at("optimizers")) {
      auto net = make_net(one.value("dropout", 0.0), static_cast<int>(models_.size()));
      auto inner = make_optimizer(kind, lr, net->parameters());
      auto schedule = make_scheduler(one.at("schedule"), *inner);
      auto [model, optimizer, scheduler] = accelerator_.prepare(net, inner, schedule);
      models_.push_back(model);
      optimizers_.push_back(optimizer);
      schedulers_.push_back(scheduler);
    }
    const std::int64_t rows = one.at("rows");
    const auto inputs = wave(rows * 6, 0.3).view({rows, 6}).to(torch::kFloat);
    const auto targets = wave(rows, 0.9).to(torch::kFloat);
    set_seed(grid.at("seed"));
    loader_ = accelerator_.prepare(make_data_loader(
        std::pair{inputs, targets},
        {.batch_size = grid.at("batch_size").get<std::int64_t>(), .shuffle = true}));
    accelerator_.register_for_checkpointing(progress_, history_);
    set_seed(grid.at("seed"), {.device_specific = true});
  }

  void load(const fs::path& folder) {
    accelerator_.load_state(folder, {.strict_rng = true});
    trace_["drawn_after_load"] = draw(accelerator_);
    trace_["history_after_load"] = history_.last;
  }

  Json train(std::int64_t end, const fs::path& folder) {
    const std::int64_t in_epoch = loader_->size();
    while (progress_.steps < end) {
      const auto epoch = progress_.batches / in_epoch;
      const auto seen = progress_.batches % in_epoch;
      auto pass = *loader_;
      if (!one_.value("stateful", false) && seen > 0) {
        pass = accelerator_.skip_first_batches(*loader_, seen);
      }
      pass.set_epoch(epoch);
      for (auto& [x, y] : pass) {
        const auto batch = [&, &x = x, &y = y] { train_batch(x, y); };
        if (models_.size() == 1) accelerator_.accumulate(batch, models_[0]);
        if (models_.size() == 2) accelerator_.accumulate(batch, models_[0], models_[1]);
        ++progress_.batches;
        if (!accelerator_.sync_gradients()) continue;
        ++progress_.steps;
        if (progress_.steps % every_ == 0) finish_part(folder);
        if (progress_.steps == end) break;
      }
    }
    return trace_;
  }

 private:
  void train_batch(const torch::Tensor& x, const torch::Tensor& y) {
    auto output = models_[0](x);
    if (models_.size() == 2) output = output + models_[1](x);
    const auto loss = torch::mse_loss(output, y);
    accelerator_.backward(loss);
    if (accelerator_.sync_gradients() && one_.contains("clip_norm")) {
      accelerator_.clip_grad_norm_(models_[0].parameters(), one_.at("clip_norm"));
    }
    for (auto& optimizer : optimizers_) optimizer.step();
    for (auto& scheduler : schedulers_) scheduler.step();
    for (auto& optimizer : optimizers_) optimizer.zero_grad();
    const double mean = accelerator_.reduce(loss.detach(), Reduction::kMean).item<double>();
    history_.add(mean);
    part_["losses"].push_back(mean);
    if (!accelerator_.sync_gradients()) return;
    for (auto& scheduler : schedulers_) part_["rates"].push_back(scheduler.get_last_lr()[0]);
  }

  /// Saves, and notes how it was and what is drawn next.
  void finish_part(const fs::path& folder) {
    const auto step = std::to_string(progress_.steps);
    accelerator_.save_state(folder / step,
                            {.safe_serialization = one_.value("safe_serialization", true)});
    part_["drawn_after_save"] = draw(accelerator_);
    part_["history"] = history_.last;
    part_["mean"] = history_.mean.item<double>();
    for (const auto& model : models_) {
      for (const auto& entry : model.state_dict()) {
        const auto values = entry.value().to(torch::kDouble).contiguous();
        for (std::int64_t i = 0; i < values.numel(); ++i) {
          part_["parameters"].push_back(values.const_data_ptr<double>()[i]);
        }
      }
    }
    trace_[step] = std::exchange(part_, Json::object());
  }

  Json one_;
  std::int64_t every_;
  Accelerator accelerator_;
  std::vector<PreparedModel<Net>> models_;
  std::vector<AcceleratedOptimizer> optimizers_;
  std::vector<AcceleratedScheduler> schedulers_;
  std::optional<DataLoader<std::pair<torch::Tensor, torch::Tensor>>> loader_;
  Progress progress_;
  History history_;
  Json part_ = Json::object();
  Json trace_ = Json::object();
};

// ---- the scaler of float16 ----------------------------------------------------------------------

/// A CPU has none in a run, so that it is driven by hand; some gradients are infinite.
Json train_scaler(const fs::path& from, int begin, int end, const fs::path& folder) {
  GradScaler scaler({.init_scale = begin == 0 ? 1024.0 : 2.0,
                     .growth_factor = begin == 0 ? 4.0 : 2.0,
                     .backoff_factor = begin == 0 ? 0.25 : 0.5,
                     .growth_interval = begin == 0 ? 3 : 2000});
  const StateEntry entry{StateKind::kScaler, "scaler",
                         accelerate::detail::state::make_stateful(scaler)};
  if (begin > 0) load_accelerator_state(from, {&entry, 1});
  auto weight = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, 0.1);
  Json scales = Json::array();
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    scaler.scale(weight.sum() * (step % 7 == 5 ? std::numeric_limits<double>::infinity() : 1.0))
        .backward();
    scaler.step(optimizer);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  fs::create_directories(folder);
  save_accelerator_state(folder, {}, {&entry, 1});
  return {{std::to_string(end), {{"losses", scales}}}};
}

void run(const std::string& cases, const fs::path& work, const std::string& chain,
         const std::string& from, int begin, int end) {
  torch::set_num_threads(1);  // as in Python: the order of additions depends on it
  const auto grid = test::read_json(cases);
  const PartialState state({.cpu = true});
  const auto ranks = "." + std::to_string(state.num_processes());
  Json traces = Json::object();
  for (const auto& one : test::cases_for(grid, state.num_processes())) {
    const std::string name = one.at("name");
    CaseRun case_run(grid, one);
    if (begin > 0) case_run.load(work / (from + ranks) / name / std::to_string(begin));
    traces[name] = case_run.train(end, work / (chain + ranks) / name);
  }
  if (!state.is_main_process()) return;
  for (int step = begin; step < end; step += 20) {
    const auto before = step == begin ? from : chain;
    traces["scaler"].update(
        train_scaler(work / (before + ranks) / "scaler" / std::to_string(step), step, step + 20,
                     work / (chain + ranks) / "scaler" / std::to_string(step + 20)));
  }
  std::ofstream file(work / (chain + ranks + ".json"));
  if (!(file << traces.dump() << "\n")) throw std::runtime_error("cannot write the traces");
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    if (argc != 8 || std::string(argv[1]) != "run") {
      throw std::runtime_error("usage: interop_checkpoints run CASES WORK CHAIN FROM BEGIN END");
    }
    run(argv[2], argv[3], argv[4], argv[5], std::stoi(argv[6]), std::stoi(argv[7]));
  });
}
