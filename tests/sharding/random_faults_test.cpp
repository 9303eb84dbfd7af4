// Faults at random in sharded training: whatever becomes of a rank, wherever that is, all others
// name it and end, and no rank computes a wrong number before.
//
// ACCELERATE_TEST_RUNS says how many runs there are and ACCELERATE_TEST_SEED which: a run is made
// from the seed and its number, but for what the system's scheduler adds.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <regex>
#include <string>
#include <thread>

#include "accelerate/errors.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "lazy/trigger.h"
#include "sharding/sharded_run.h"
#include "support/has.h"
#include "support/on_processes.h"
#include "support/random_faults.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using detail::str;
using detail::lazy::ManagedStorage;
using test::has;
using test::kRanksDisagree;
using test::kRuns;
using test::kSeed;
using test::number_from;
using test::OffloadTarget;
using test::pick;
using test::Random;
using test::random_of;
using test::ShardedRun;
using test::ShardLevel;
using test::TinyGpt;
using test::uncaught;

constexpr int kSteps = 4;

// -- What happens in a run ------------------------------------------------------------------------

enum class Fault {
  kEnds,
  kThrows,
  kKilled,
  kOutOfMemory,
  kThrowsInFill,
  kSkipsInFirstStep,
  kSkipsLater,
  kEvaluatesMore,
  kGathersMore,
  kDoesNotSynchronize,
  kDoesNotStep,
  kDiskIsFull,
  kAllThrow,
};
constexpr std::array<const char*, 13> kFaults = {"ends",
                                                 "throws",
                                                 "killed",
                                                 "is out of memory",
                                                 "throws in a fill",
                                                 "skips a block in the first step",
                                                 "skips a block later",
                                                 "evaluates once more",
                                                 "gathers once more",
                                                 "does not synchronize",
                                                 "does not step",
                                                 "has a full disk",
                                                 "and all others throw"};

/// Where in a step it happens.
enum class Place { kBeforeForward, kInForward, kInBackward, kBeforeStep, kAfterStep };
constexpr std::array<const char*, 5> kPlaces = {"before forward", "in forward", "in backward",
                                                "before the optimizer", "after the optimizer"};

struct Plan {
  Fault fault = Fault::kEnds;
  Place place = Place::kBeforeForward;
  int ranks = 2;
  int stray = 0;
  int step = 0;
  int block = 0;
  int batches = 1;
  int detail = 0;  ///< microseconds, bytes, or a count of allocations
  std::string backend = "shm";
  detail::sharding::ShardSpec spec;

  [[nodiscard]] bool has_lazy_units() const { return spec.level == ShardLevel::kParameters; }
  [[nodiscard]] std::string text() const {
    return str("rank ", stray, " of ", ranks, " ", kFaults[static_cast<std::size_t>(fault)], " ",
               kPlaces[static_cast<std::size_t>(place)], ", step ", step, ", block ", block,
               ", detail ", detail, "; ", backend, ", level ", static_cast<int>(spec.level),
               ", prefetch ", spec.forward_prefetch, ", reshard ", spec.reshard_after_forward,
               ", batches ", batches, spec.accumulate_unsharded ? " kept" : " reduced",
               spec.offload.parameters == OffloadTarget::kCpu ? ", offloaded" : "");
  }
};

/// Faults that only a model whose units come and go can have.
bool needs_lazy_units(Fault fault) {
  return fault == Fault::kThrowsInFill || fault == Fault::kSkipsInFirstStep;
}

Plan plan_of(std::uint64_t seed, std::uint64_t run) {
  auto random = random_of(seed, run);
  Plan plan;
  plan.fault = static_cast<Fault>(pick(random, 0, static_cast<int>(Fault::kAllThrow)));
  plan.place = static_cast<Place>(pick(random, 0, 4));
  plan.ranks = pick(random, 2, 4);
  plan.stray = pick(random, 0, plan.ranks - 1);
  plan.step = pick(random, 0, kSteps - 1);
  plan.block = pick(random, 0, test::kBlocks - 1);
  plan.batches = pick(random, 0, 2) == 0 ? 2 : 1;
  plan.backend = pick(random, 0, 2) == 0 ? "gloo" : "shm";
  const int level = pick(random, 0, 3);  // 3 twice as often
  plan.spec =
      test::sharded(static_cast<ShardLevel>(needs_lazy_units(plan.fault) || level == 0 ? 3 : level),
                    pick(random, 0, 2));
  plan.spec.reshard_after_forward = pick(random, 0, 2) > 0;
  plan.spec.accumulate_unsharded = pick(random, 0, 1) > 0;
  plan.spec.prefetch_after_gradients = pick(random, 0, 3) == 0;
  plan.spec.state_dict_type =
      pick(random, 0, 1) > 0 ? StateDictType::kFullStateDict : StateDictType::kShardedStateDict;
  if (pick(random, 0, 3) == 0) {
    plan.spec.offload = {.parameters = OffloadTarget::kCpu, .optimizer = OffloadTarget::kCpu};
  }
  plan.detail = pick(random, 0, 20'000);
  if (plan.fault == Fault::kSkipsInFirstStep) plan.step = 0;
  if (plan.fault == Fault::kSkipsLater) plan.step = pick(random, 1, kSteps - 1);
  if (plan.fault == Fault::kDoesNotSynchronize) {
    plan.batches = 1;
    plan.spec.accumulate_unsharded = true;
  }
  if (plan.fault == Fault::kDoesNotStep && plan.has_lazy_units()) {
    plan.spec.level = ShardLevel::kGradients;  // else a step is no collective
  }
  if (plan.fault == Fault::kAllThrow) plan.place = Place::kInForward;
  const bool is_message = plan.fault == Fault::kDiskIsFull || plan.fault == Fault::kEvaluatesMore;
  if (is_message && (plan.place == Place::kInForward || plan.place == Place::kInBackward)) {
    plan.place = Place::kAfterStep;
  }
  return plan;
}

/// Nobody is to blame: the run comes to its end, with the numbers of data parallelism.
bool is_harmless(const Plan& plan) {
  return plan.fault == Fault::kSkipsLater || plan.fault == Fault::kDiskIsFull ||
         plan.fault == Fault::kAllThrow ||
         (plan.fault == Fault::kEvaluatesMore && !plan.has_lazy_units());
}

// -- What the ranks do ----------------------------------------------------------------------------

/// The allocator of the process, which fails once when it is told to.
class FailingAllocator final : public c10::Allocator {
 public:
  static FailingAllocator& instance() {
    static auto& one = *new FailingAllocator;
    return one;
  }
  /// From now on the allocation after `count` ones of some kilobytes fails.
  void fail_after(int count) { left_ = count; }

  c10::DataPtr allocate(std::size_t bytes) override {
    const bool fails = bytes >= 4096 && left_ >= 0 && left_-- == 0;
    TORCH_CHECK_WITH(OutOfMemoryError, !fails, "there is no memory for ", bytes, " bytes");
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  FailingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 100); }
  c10::Allocator* inner_;
  std::atomic<int> left_ = -1;
};

/// What the trigger knows of a parameter, with fills that fail.
class FailingStorage final : public ManagedStorage {
 public:
  explicit FailingStorage(std::shared_ptr<ManagedStorage> inner) : inner_(std::move(inner)) {}
  void pin(detail::lazy::Access) override { throw std::runtime_error("the bus has failed"); }
  void unpin() noexcept override {}
  [[nodiscard]] c10::Device device() const override { return inner_->device(); }

 private:
  std::shared_ptr<ManagedStorage> inner_;
};

/// One rank of a run.
class Rank {
 public:
  Rank(const Plan& plan, std::filesystem::path folder)
      : plan_(plan),
        folder_(std::move(folder)),
        strays_(PartialState().process_index() == plan.stray) {}

  void run() {
    const auto wanted = losses_of_data_parallelism();
    ShardedRun training(options());
    training_ = &training;
    training.net->at_block = [this](int block, bool backward) {
      if (block == plan_.block) at(backward ? Place::kInBackward : Place::kInForward);
    };
    for (step_ = 0; step_ < kSteps; ++step_) {
      at(Place::kBeforeForward);
      if (plan_.fault == Fault::kAllThrow && step_ == plan_.step) {
        EXPECT_THROW((void)training.train(step_, 0, true), std::runtime_error);
      }
      skip_blocks(training.net, step_);
      for (batch_ = 0; batch_ < plan_.batches; ++batch_) {
        const double loss = training.train(step_, batch_, synchronizes());
        check(loss, wanted.at(static_cast<std::size_t>(step_ * plan_.batches + batch_)));
      }
      at(Place::kBeforeStep);
      take_step();
      at(Place::kAfterStep);
    }
    if (is_harmless(plan_)) return;
    if (strays_ && plan_.fault == Fault::kKilled) std::this_thread::sleep_for(5s);  // until then
    // Whoever comes so far without the stray rank finds out here.
    training.accelerator.wait_for_everyone();
  }

 private:
  [[nodiscard]] test::RunOptions options() const {
    return {.spec = plan_.spec, .step = test::Step::kMomentum, .batches = plan_.batches};
  }

  std::vector<double> losses_of_data_parallelism() {
    auto plain = options();
    plain.spec = std::nullopt;
    plain.steps = kSteps;
    plain.find_unused = plan_.fault == Fault::kSkipsLater;
    plain.before_step = [this](TinyGpt& net, int step) { skip_blocks(net, step); };
    return test::run(plain).losses;
  }

  /// Also in the run that says what is right.
  void skip_blocks(TinyGpt& net, int step) const {
    const bool skips = strays_ && plan_.fault == Fault::kSkipsLater && step >= plan_.step;
    const bool strays =
        training_ != nullptr && strays_ && step == 0 && plan_.fault == Fault::kSkipsInFirstStep;
    if (skips || strays) {
      net->skipped = {plan_.block};
    } else {
      net->skipped = {};
    }
  }

  [[nodiscard]] bool is_now(Fault fault) const {
    return strays_ && plan_.fault == fault && step_ == plan_.step;
  }

  [[nodiscard]] bool synchronizes() const {
    return batch_ + 1 == plan_.batches && !is_now(Fault::kDoesNotSynchronize);
  }

  void take_step() {
    if (is_now(Fault::kDoesNotStep)) return;
    training_->optimizer.step();
    training_->optimizer.zero_grad();
  }

  void check(double loss, double wanted) const {
    // In memory of one host sums have one order; Gloo's depends on the number of processes. Where
    // data parallelism looks for unused parameters it divides before it sums up.
    const bool divides_first = plan_.fault == Fault::kSkipsLater && plan_.ranks == 3;
    const bool is_exact = plan_.backend == "shm" && plan_.batches == 1 && !divides_first;
    const double allowed = is_exact ? 0 : 1e-5;
    const bool skips = strays_ && plan_.fault == Fault::kSkipsInFirstStep;
    if (skips || std::abs(loss - wanted) <= allowed) return;
    detail::write_fully(STDERR_FILENO, str("wrong number: a loss of ", loss, " instead of ", wanted,
                                           " in step ", step_, ", batch ", batch_, "\n"));
    ADD_FAILURE() << "a wrong number";
  }

  /// The program has come to `place`. Does what the plan wants there.
  void at(Place place) {
    if (place != plan_.place || step_ != plan_.step || done_) return;
    if (plan_.fault == Fault::kDiskIsFull) return save_to_full_disk();
    if (plan_.fault == Fault::kAllThrow) {
      done_ = true;
      throw std::runtime_error("all of us");
    }
    if (!strays_) return;
    done_ = true;
    switch (plan_.fault) {
      case Fault::kEnds:
        std::exit(0);
      case Fault::kThrows:
        throw std::runtime_error("a fault of the program");
      case Fault::kKilled:
        return end_by_signal();
      case Fault::kOutOfMemory:
        return FailingAllocator::instance().fail_after(plan_.detail % 40);
      case Fault::kThrowsInFill:
        return fail_to_fill();
      case Fault::kGathersMore:
        (void)gather(torch::ones({9}));
        return;
      case Fault::kEvaluatesMore:
        return evaluate();
      default:
        return;
    }
  }

  /// The signal comes from beside, while this thread trains on.
  void end_by_signal() const {
    std::thread([delay = std::chrono::microseconds(plan_.detail)] {
      std::this_thread::sleep_for(delay);
      ::kill(::getpid(), SIGKILL);
    }).detach();
  }

  void fail_to_fill() const {
    const auto weight = training_->net->blocks->ptr(plan_.block)->as<test::Block>()->up->weight;
    detail::lazy::manage_storage(
        *weight.storage().unsafeGetStorageImpl(),
        std::make_shared<FailingStorage>(detail::lazy::find_managed(weight)));
  }

  void evaluate() const {
    const torch::NoGradGuard no_grad;
    (void)training_->model(torch::zeros({1, 8}, torch::kLong));
  }

  /// One process cannot write all of its files.
  void save_to_full_disk() {
    done_ = true;
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{.rlim_cur = static_cast<rlim_t>(plan_.detail % 3000),
                       .rlim_max = before.rlim_max};
    if (strays_) ::setrlimit(RLIMIT_FSIZE, &small);
    std::string message;
    try {
      training_->accelerator.save_state(folder_ / "state");
    } catch (const Error& error) {
      message = error.what();
    }
    ::setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_NE(message, "") << "all must learn that the checkpoint is not there";
    EXPECT_FALSE(std::filesystem::exists(folder_ / "state" / "accelerate_state.json"));
    std::cerr << message << "\n";
    training_->accelerator.save_state(folder_ / "state");
  }

  const Plan& plan_;
  std::filesystem::path folder_;
  bool strays_;
  ShardedRun* training_ = nullptr;
  int step_ = 0;
  int batch_ = 0;
  bool done_ = false;
};

// -- What must come of it -------------------------------------------------------------------------

/// What the report on the other ranks must say.
std::string finding_of(const Plan& plan) {
  const auto stray = str("accelerate: rank ", plan.stray, "( \\([^)]*\\))? ");
  switch (plan.fault) {
    case Fault::kEnds:
      return stray + "has ended ";
    case Fault::kThrows:
      return stray + "failed .*a fault of the program";
    case Fault::kKilled:
      return stray + "died ";
    case Fault::kOutOfMemory:
      return stray + "failed .*there is no memory for";
    case Fault::kThrowsInFill:
      return stray + "failed .*the bus has failed";
    default:
      if (plan.ranks == 2) return "accelerate: the ranks are in different collectives:";
      return stray + "is in another collective than the others:";
  }
}

/// What it breaks may not be used any more.
bool may_not_happen(const Plan& plan) {
  return plan.fault == Fault::kOutOfMemory || plan.fault == Fault::kThrowsInFill;
}

/// Empty when all is as it should be.
std::string complaint(const Plan& plan, const std::vector<RankOutcome>& outcomes) {
  const std::regex finding(finding_of(plan));
  bool all_well = true;
  for (const auto& outcome : outcomes) all_well = all_well && outcome.ok();
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const auto& outcome = outcomes[static_cast<std::size_t>(rank)];
    if (outcome.timed_out) return str("rank ", rank, " hangs");
    if (has(outcome.output, "wrong number")) return str("rank ", rank, " has a wrong number");
    if (is_harmless(plan) || (all_well && may_not_happen(plan))) {
      if (!outcome.ok()) return str("rank ", rank, " ended with code ", outcome.exit_code);
      continue;
    }
    if (rank == plan.stray) continue;
    if (outcome.exit_code != kRanksDisagree) {
      return str("rank ", rank, " ended with code ", outcome.exit_code, " and signal ",
                 outcome.signal);
    }
    if (!std::regex_search(outcome.output, finding)) {
      return str("rank ", rank, " does not say '", finding_of(plan), "'");
    }
  }
  return "";
}

TEST(ShardedRandomFaults, AreNamedByAllOtherRanksAndNoNumberIsWrong) {
  const auto seed = number_from(kSeed, std::random_device{}());
  const auto first = number_from("ACCELERATE_TEST_FIRST_RUN", 0);
  const auto runs = number_from(kRuns, 8);
  const test::SharedFolder folder;
  double slowest = 0;
  std::uint64_t bad = 0;
  for (auto run = first; run < first + runs; ++run) {
    const auto plan = plan_of(seed, run);
    auto options = folder.options();
    options.timeout = 40s;
    options.environment.emplace_back("ACCELERATE_HOST_BACKEND", plan.backend);
    options.environment.emplace_back(kSeed, str(seed));
    const auto outcomes = run_processes(plan.ranks, options, [&] {
      uncaught([&] { Rank(plan, folder.path() / str("run ", run)).run(); });
    });
    if (in_child_process()) continue;
    for (const auto& outcome : outcomes) slowest = std::max(slowest, outcome.seconds);
    const auto wrong = complaint(plan, outcomes);
    if (wrong.empty()) continue;
    ++bad;
    std::string written;
    for (int rank = 0; rank < plan.ranks; ++rank) {
      written +=
          str("-- rank ", rank, " wrote:\n", outcomes[static_cast<std::size_t>(rank)].output);
    }
    ADD_FAILURE() << kSeed << "=" << seed << ", run " << run << ", " << plan.text() << ": " << wrong
                  << "\n"
                  << written;
  }
  if (in_child_process()) return;
  std::cout << runs << " runs with " << kSeed << "=" << seed << ", " << bad
            << " of them bad; the slowest took " << slowest << " s\n";
}

}  // namespace
}  // namespace accelerate
