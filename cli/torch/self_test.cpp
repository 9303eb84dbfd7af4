// The checks of `accelerate test`, in the order in which they build on each other.
//
// A check notes what is wrong instead of throwing, so that all ranks make the same collective calls
// and learn what was wrong first, and where.
#include "cli/torch/self_test.h"

#include <accelerate/accelerate.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <numeric>
#include <set>
#include <thread>

#include "core/text.h"

namespace accelerate::detail {
namespace {

namespace fs = std::filesystem;
namespace F = torch::nn::functional;

constexpr std::string_view kSuccess =
    "Test is a success! You are ready for your distributed training!";
// Only for the tests of this program: "1:collectives" makes rank 1 do that check wrong, "1:exit"
// ends rank 1 without a word.
constexpr const char* kFaultVariable = "ACCELERATE_SELF_TEST_FAULT";
constexpr std::int64_t kSeed = 42;

std::string text_of(const torch::Tensor& tensor) {
  constexpr std::int64_t kShown = 16;
  std::vector<double> values;
  const auto flat = tensor.detach().to(torch::kCPU, torch::kDouble).flatten();
  for (std::int64_t i = 0; i < std::min(flat.numel(), kShown); ++i) {
    values.push_back(flat[i].item<double>());
  }
  return str("[", join(values), flat.numel() > kShown ? ", ...]" : "]");
}

/// One check as one process sees it.
class Check {
 public:
  Check(Accelerator& accelerator, bool faulty) : accelerator(accelerator), faulty_(faulty) {}

  [[nodiscard]] int rank() const { return accelerator.process_index(); }
  [[nodiscard]] int ranks() const { return accelerator.num_processes(); }
  /// What checks add to their input: 0, and 1 on a rank that is broken on purpose.
  [[nodiscard]] int fault() const { return faulty_ ? 1 : 0; }
  [[nodiscard]] torch::TensorOptions on_device() const {
    return torch::TensorOptions(torch::kFloat).device(accelerator.device());
  }

  void expect(const std::string& what, const std::string& expected, const std::string& got) {
    if (expected != got) note(what, expected, got);
  }
  void expect(const std::string& what, const torch::Tensor& expected, const torch::Tensor& got,
              double tolerance = 0) {
    const auto wanted = expected.detach().to(torch::kCPU, torch::kDouble);
    const auto found = got.detach().to(torch::kCPU, torch::kDouble);
    if (wanted.sizes() == found.sizes() && torch::allclose(found, wanted, tolerance, tolerance)) {
      return;
    }
    note(what, text_of(wanted), text_of(found));
  }
  /// What was wrong first on this rank; empty if nothing was.
  [[nodiscard]] const std::vector<std::string>& wrong() const { return wrong_; }

  Accelerator& accelerator;

 private:
  void note(const std::string& what, const std::string& expected, const std::string& got) {
    if (!wrong_.empty()) return;
    wrong_.push_back(str("rank ", rank(), ": ", what, ": expected ", expected, ", got ", got));
  }

  bool faulty_;
  std::vector<std::string> wrong_ = {};
};

// ---- the checks: each returns what it has seen if nothing is wrong ------------------------------

std::string check_state(Check& check) {
  const auto& accelerator = check.accelerator;
  const auto ranks = gather_object(std::vector<int>{check.rank() + check.fault()});
  const auto mains = gather_object(std::vector<bool>{accelerator.is_main_process()});
  const auto lasts = gather_object(std::vector<bool>{accelerator.is_last_process()});
  for (int i = 0; i < check.ranks(); ++i) {
    const auto who = str(" of process ", i);
    check.expect(str("rank", who), str(i), str(ranks.at(i)));
    check.expect(str("is_main_process", who), str(i == 0), str(bool(mains.at(i))));
    check.expect(str("is_last_process", who), str(i == check.ranks() - 1), str(bool(lasts.at(i))));
  }
  const auto devices = gather_object(std::vector<std::string>{accelerator.device().str()});
  return str("ranks 0 to ", check.ranks() - 1, " on ", join(devices));
}

std::string check_order(Check& check) {
  using Clock = std::chrono::steady_clock;  // the same on all processes of a host
  const auto& accelerator = check.accelerator;
  double seconds = 0;
  accelerator.local_main_process_first([&] {
    if (accelerator.is_local_main_process()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    seconds = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  });
  const auto all = gather_object(std::vector<double>{seconds - 60 * check.fault()});
  const double first = all.at(check.rank() - accelerator.local_process_index());
  check.expect("runs after the local main process", "true", str(all.at(check.rank()) >= first));
  return "local_main_process_first runs on the main process of a host before the others";
}

std::string check_collectives(Check& check) {
  const int n = check.ranks();
  const auto ranks = torch::arange(n, check.on_device());
  const auto own = torch::full({1}, check.rank() + check.fault(), check.on_device());
  check.expect("gather of the ranks", ranks, gather(own));
  check.expect("reduce of the ranks, sum", ranks.sum().view(1), reduce(own, Reduction::kSum));
  check.expect("reduce of the ranks, mean", ranks.mean().view(1), reduce(own, Reduction::kMean),
               1e-6);
  check.expect("broadcast from the last rank", ranks.slice(0, n - 1),
               broadcast(own.clone(), n - 1));
  const auto padded =
      pad_across_processes(torch::ones({check.rank() + 1}, check.on_device()), {.pad_index = -1});
  check.expect("pad_across_processes with -1", torch::where(ranks <= check.rank(), 1.0, -1.0),
               padded);
  const auto objects = gather_object(std::vector<std::string>{str("rank ", check.rank())});
  check.expect("gather_object, length", str(n), str(objects.size()));
  check.expect("gather_object, last", str("rank ", n - 1), objects.back());
  std::vector<std::string> words = {str("rank ", check.rank())};
  check.expect("broadcast_object_list from rank 0", "rank 0", broadcast_object_list(words)[0]);
  return "gather, reduce, broadcast, pad_across_processes, gather_object, broadcast_object_list";
}

std::string check_split(Check& check) {
  std::vector<int> all(static_cast<std::size_t>(check.ranks()) * 2 + 1);
  std::iota(all.begin(), all.end(), 0);
  auto part = check.accelerator.split_between_processes(all);
  part[0] += check.fault();
  check.expect("all parts in rank order", join(all), join(gather_object(part)));
  const auto padded = check.accelerator.split_between_processes(all, {.apply_padding = true});
  check.expect("length of a padded part", check.ranks() > 1 ? "3" : str(all.size()),
               str(padded.size()));
  return str("split_between_processes of ", all.size(), " items, also padded");
}

std::string check_random(Check& check) {
  set_seed(kSeed + check.rank());
  synchronize_rng_states({RNGType::kTorch});
  if (check.fault() != 0) (void)torch::rand(1);
  const auto drawn = gather(torch::rand({1, 4}).to(check.accelerator.device()));
  check.expect("numbers drawn after synchronize_rng_states", drawn[0], drawn[check.rank()]);
  set_seed(kSeed, {.device_specific = true});
  const auto first = gather_object(std::vector<double>{torch::rand(1).item<double>()});
  const bool differ = std::set<double>(first.begin(), first.end()).size() == first.size();
  check.expect("each rank draws other numbers with device_specific", "true", str(differ));
  return "synchronize_rng_states gives one state to all, set_seed device_specific one to each";
}

std::string check_data_loader(Check& check) {
  const auto samples = 5 * check.ranks() + 1;  // the last batches are uneven
  for (const bool dispatch : {false, true}) {
    auto loader = prepare_data_loader(
        make_data_loader(torch::arange(samples), {.batch_size = 2, .shuffle = true}),
        {.put_on_device = true, .dispatch_batches = dispatch});
    std::vector<torch::Tensor> seen;
    for (auto& batch : loader) {
      seen.push_back(check.accelerator.gather_for_metrics(batch + check.fault()));
    }
    check.expect(dispatch ? "samples of a pass, dispatched" : "samples of a pass",
                 torch::arange(samples), std::get<0>(torch::cat(seen).sort()));
  }
  return str("each of ", samples, " shuffled samples once, sharded and dispatched");
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{3, 8}, second{8, 1};
};
TORCH_MODULE(Net);

Net make_net() {
  set_seed(kSeed);
  return Net();
}

std::string check_precision(Check& check) {
  const auto precision = check.accelerator.mixed_precision();
  auto expected = torch::kFloat;
  if (precision == PrecisionType::kBf16) expected = torch::kBFloat16;
  if (precision == PrecisionType::kFp16 && check.accelerator.device().is_cuda()) {
    expected = torch::kHalf;
  }
  const auto given = check.fault() == 0 ? torch::kFloat : torch::kDouble;
  auto net = make_net();
  net->to(given);
  auto model = check.accelerator.prepare_model(net, {.evaluation_mode = true});
  const auto x = torch::ones({2, 3}, check.on_device().dtype(given));
  check.expect("dtype inside the model", c10::toString(expected),
               c10::toString(model->forward(x).scalar_type()));
  check.expect("dtype of the result", "Float", c10::toString(model(x).scalar_type()));
  return str("'", to_string(precision), "': computes in ", c10::toString(expected),
             ", results are Float");
}

constexpr std::int64_t kBatch = 4;
constexpr int kSteps = 12;

struct Trained {
  std::vector<double> losses = {};
  Net net{nullptr};
};

torch::optim::SGD make_optimizer(const Net& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

std::pair<torch::Tensor, torch::Tensor> training_data(int ranks) {
  const auto x = torch::linspace(-1, 1, kSteps * kBatch * ranks * 3).view({-1, 3});
  return {x, x.sin().sum(1, /*keepdim=*/true) / 4};
}

Trained train_together(Check& check, int accumulation) {
  auto& accelerator = check.accelerator;
  accelerator.set_gradient_accumulation_steps(accumulation);
  Trained result{.net = make_net()};
  auto [x, y] = training_data(check.ranks());
  auto [model, optimizer, loader] = accelerator.prepare(
      result.net, make_optimizer(result.net),
      make_data_loader(std::pair{x, y}, {.batch_size = kBatch, .shuffle = true}));
  for (auto& [inputs, targets] : loader) {
    auto accumulating = accelerator.accumulate(model);
    const auto loss = F::mse_loss(model(inputs), targets + check.fault());
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<double>());
  }
  return result;
}

/// One process with the batches of all, in a plain loop of LibTorch.
Trained train_alone(Check& check, int accumulation) {
  Trained result{.net = make_net()};
  result.net->to(check.accelerator.device());
  auto optimizer = make_optimizer(result.net);
  auto [x, y] = training_data(check.ranks());
  // The order that `data_seed` stands for.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(kSeed);
  const auto order = torch::randperm(x.size(0), generator, torch::TensorOptions(torch::kLong));
  const auto global_batch = kBatch * check.ranks();
  for (int step = 0; step < kSteps; ++step) {
    const auto chosen = order.slice(0, step * global_batch, (step + 1) * global_batch);
    const auto precision = check.accelerator.autocast();
    const auto output =
        result.net(x.index_select(0, chosen).to(check.accelerator.device())).to(torch::kFloat);
    const auto loss = F::mse_loss(output, y.index_select(0, chosen).to(check.accelerator.device()));
    (loss / accumulation).backward();
    result.losses.push_back(loss.item<double>());
    if ((step + 1) % accumulation != 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  return result;
}

std::string compare_training(Check& check, int accumulation) {
  const auto alone = train_alone(check, accumulation);
  const auto together = train_together(check, accumulation);
  // Sums are made in another order; 16-bit formats round each of them to 3 or 4 digits.
  const bool full = check.accelerator.mixed_precision() == PrecisionType::kNo;
  const double tolerance = full ? 1e-4 : 5e-3;
  check.expect("losses", torch::tensor(alone.losses), torch::tensor(together.losses), tolerance);
  const auto weights = together.net->named_parameters();
  for (const auto& entry : alone.net->named_parameters()) {
    check.expect(entry.key(), entry.value(), weights[entry.key()], tolerance);
  }
  return str(kSteps, " batches of ", kBatch * check.ranks(), " samples, ", accumulation,
             " per step: losses and weights of one process within ", tolerance, " (loss ",
             together.losses.front(), " to ", together.losses.back(), ")");
}
std::string check_training(Check& check) { return compare_training(check, 1); }
std::string check_accumulation(Check& check) { return compare_training(check, 3); }

std::string check_trigger(Check& check) {
  if (check.accelerator.is_last_process() && check.fault() == 0) check.accelerator.set_trigger();
  check.expect("check_trigger after one rank has set it", "true",
               str(check.accelerator.check_trigger()));
  check.expect("check_trigger afterwards", "false", str(check.accelerator.check_trigger()));
  return "set_trigger on the last rank is seen by all, once";
}

/// A new folder on each host, made by its first process and removed with this object.
class HostFolder {
 public:
  explicit HostFolder(const Accelerator& accelerator) {
    if (accelerator.is_local_main_process()) {
      own_ = (fs::temp_directory_path() / "accelerate-test-XXXXXX").string();
      if (::mkdtemp(own_.data()) == nullptr) {
        throw Error(str("No folder can be made in ", fs::temp_directory_path(),
                        ". Set TMPDIR to one that can be written."));
      }
    }
    const auto all = gather_object(std::vector<std::string>{own_});
    path = all.at(accelerator.process_index() - accelerator.local_process_index());
  }
  ~HostFolder() {
    std::error_code ignored;
    if (!own_.empty()) fs::remove_all(own_, ignored);
  }
  HostFolder(const HostFolder&) = delete;
  HostFolder& operator=(const HostFolder&) = delete;

  fs::path path;

 private:
  std::string own_;
};

std::string check_files(Check& check) {
  const HostFolder folder(check.accelerator);
  const auto saved = make_net();
  check.accelerator.save_model(saved, folder.path, {.save_on_each_node = true});
  Net loaded;
  load_checkpoint_in_model(*loaded, folder.path, {.strict = true});
  const torch::NoGradGuard no_grad;
  loaded->second->bias.add_(check.fault());
  const auto parameters = loaded->named_parameters();
  for (const auto& entry : saved->named_parameters()) {
    check.expect(entry.key(), entry.value(), parameters[entry.key()]);
  }
  check.accelerator.wait_for_everyone();  // all have read
  return "save_model, then load_checkpoint_in_model on every rank: the same weights";
}

struct NamedCheck {
  std::string_view name;
  std::string (*run)(Check&);
};
constexpr std::array kChecks = {
    NamedCheck{"state", check_state},
    NamedCheck{"process order", check_order},
    NamedCheck{"collectives", check_collectives},
    NamedCheck{"split", check_split},
    NamedCheck{"random states", check_random},
    NamedCheck{"data loader", check_data_loader},
    NamedCheck{"mixed precision", check_precision},
    NamedCheck{"training", check_training},
    NamedCheck{"gradient accumulation", check_accumulation},
    NamedCheck{"trigger", check_trigger},
    NamedCheck{"saving and loading", check_files},
};

/// The check in which this rank is broken on purpose; "" for none.
std::string fault_of(int rank) {
  const char* text = std::getenv(kFaultVariable);
  if (text == nullptr) return "";
  const auto parts = split(text, ':');
  std::vector<std::string> names = {"exit"};
  for (const auto& check : kChecks) names.emplace_back(check.name);
  if (parts.size() != 2 || std::ranges::find(names, parts[1]) == names.end()) {
    throw ConfigError(str(kFaultVariable, " is '", text,
                          "', expected RANK:CHECK with one of: ", join(names), "."));
  }
  return parts[0] == str(rank) ? parts[1] : "";
}

void run(const NamedCheck& named, Accelerator& accelerator, bool faulty) {
  Check check(accelerator, faulty);
  const auto failed = str("Self-test failed at '", named.name, "': ");
  std::string seen;
  std::vector<std::string> wrong;
  try {
    seen = named.run(check);
    wrong = gather_object(check.wrong());
  } catch (const CommError& error) {  // whose exit code says that another rank is to blame
    throw CommError(str(failed, "rank ", check.rank(), ": ", error.what()), error.rank());
  } catch (const std::exception& error) {
    throw Error(str(failed, "rank ", check.rank(), ": ", error.what()));
  }
  if (!wrong.empty()) {
    throw Error(str(failed, wrong.front(), " (", wrong.size(), " of ", check.ranks(),
                    " ranks found this check wrong)"));
  }
  if (accelerator.is_main_process()) {
    std::cout << "ok  " << named.name << ": " << seen << '\n' << std::flush;
  }
}

void run_all() {
  Accelerator accelerator({.dataloader_config = {.use_seedable_sampler = true, .data_seed = kSeed},
                           // No step of the small net overflows float16 and is skipped.
                           .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024}}});
  const bool prints = accelerator.is_main_process();
  if (prints) {
    const int processes = accelerator.num_processes();
    std::cout << "Self-test: " << processes << (processes == 1 ? " process, " : " processes, ")
              << to_string(accelerator.distributed_type()) << ", mixed precision '"
              << to_string(accelerator.mixed_precision()) << "'\n"
              << std::flush;
  }
  const auto fault = fault_of(accelerator.process_index());
  if (fault == "exit") std::_Exit(1);
  for (const auto& check : kChecks) run(check, accelerator, fault == check.name);
  accelerator.end_training();
  if (prints) std::cout << kSuccess << '\n' << std::flush;
}

}  // namespace

int self_test() { return record(run_all); }

}  // namespace accelerate::detail
