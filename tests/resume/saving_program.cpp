// Saves its state again and again, to be killed meanwhile or to meet faults.
//
//     accelerate launch --num_processes 2 saving_program folder=F [async=1] [explicit=1] ...
//     LD_PRELOAD=fault_shim.so FAULT_FOLDER=F/saved saving_program folder=F faults=1 [unlisted=1]
//     [stride=7]
//
// Every save has a number, which stands in each file of the checkpoint: what was loaded is checked
// to be of one save. Rank 0 appends what it does to F/report, one line each.
#include <accelerate/accelerate.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "resume/fault_shim.h"
#include "resume/settings.h"

namespace {

namespace fs = std::filesystem;
using namespace accelerate;
using test::Settings;

struct NumberedImpl : torch::nn::Module {
  explicit NumberedImpl(std::int64_t elements) {
    for (const char* name : {"a", "b", "c"}) register_parameter(name, torch::zeros({elements}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
TORCH_MODULE(Numbered);

struct Counter {
  [[nodiscard]] Value state_dict() const { return Value::Dict{{"number", number}}; }
  void load_state_dict(const Value& state) { number = state.at("number").as_int(); }
  std::int64_t number = 0;
};

class Saver {
 public:
  explicit Saver(const Settings& settings)
      : settings_(settings),
        folder_(settings.text("folder", "")),
        project_(folder_ / "saved"),
        by_name_(settings.number("explicit", 0) != 0),
        asynchronous_(settings.number("async", 0) != 0),
        accelerator_(
            {.cpu = true,
             .project_config = ProjectConfiguration{.project_dir = project_,
                                                    .automatic_checkpoint_naming = !by_name_,
                                                    .total_limit = 1}}),
        net_(static_cast<std::int64_t>(settings.number("kilobytes", 1)) * 1024 / 4 / 3),
        optimizer_(AdamW(net_->parameters(), {.lr = 1})) {
    auto [model, optimizer] = accelerator_.prepare(net_, std::move(optimizer_));
    prepared_.emplace(std::move(optimizer));
    accelerator_.register_for_checkpointing(counter_);
  }

  [[nodiscard]] Accelerator& accelerator() { return accelerator_; }
  [[nodiscard]] const fs::path& project() const { return project_; }
  [[nodiscard]] fs::path named(const std::string& name) const { return project_ / name; }
  [[nodiscard]] bool by_name() const { return by_name_; }
  /// The folder for `save_state` and `load_state`.
  [[nodiscard]] fs::path target() const { return by_name_ ? named("fixed") : fs::path(); }

  void save(std::int64_t number, const fs::path& target) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net_->parameters()) parameter.fill_(number);
    for (auto& group : prepared_->param_groups())
      group.options().set_lr(static_cast<double>(number));
    counter_.number = number;
    torch::manual_seed(seed_of(number));
    accelerator_.save_state(target, {.asynchronous = asynchronous_});
    if (asynchronous_) accelerator_.wait_for_save_state();
  }

  /// The number of the save that was loaded. Throws if the files are of several.
  std::int64_t load(const fs::path& target) {
    counter_.number = -1;
    accelerator_.load_state(target);
    const auto number = counter_.number;
    for (const auto& parameter : net_->parameters()) {
      if (!parameter.eq(number).all().item<bool>()) mixed(number, "the weights");
    }
    if (prepared_->param_groups().front().options().get_lr() != static_cast<double>(number)) {
      mixed(number, "the optimizer");
    }
    const auto drawn = torch::rand({1}).item<float>();
    torch::manual_seed(seed_of(number));
    if (drawn != torch::rand({1}).item<float>()) mixed(number, "the random state");
    return number;
  }

  void report(const std::string& text) const {
    if (!accelerator_.is_main_process()) return;
    const int fd =
        ::open((folder_ / "report").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const auto line = text + "\n";
    if (::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
    ::close(fd);
  }

  /// What a crash may leave, and the save that has just ended must not.
  void report_leftovers() const {
    if (!accelerator_.is_main_process()) return;
    for (const auto& entry : fs::recursive_directory_iterator(project_)) {
      const auto name = entry.path().filename().string();
      if (name == ".accelerate_staging" || name.ends_with(".tmp")) {
        report("leftover " + entry.path().string());
      }
    }
  }

 private:
  [[nodiscard]] std::uint64_t seed_of(std::int64_t number) const {
    return static_cast<std::uint64_t>(number * 100 + accelerator_.process_index());
  }
  [[noreturn]] static void mixed(std::int64_t number, const std::string& what) {
    throw std::runtime_error("MIXED: " + what + " are not of save " + std::to_string(number));
  }

  const Settings& settings_;
  fs::path folder_;
  fs::path project_;
  bool by_name_;
  bool asynchronous_;
  Accelerator accelerator_;
  Numbered net_;
  AdamW optimizer_;
  std::optional<AcceleratedOptimizer> prepared_;
  Counter counter_;
};

// ---- to be killed -------------------------------------------------------------------------------

constexpr std::int64_t kBefore = 1'000'000;

/// The number to go on from: of what was loaded, or `otherwise` if it is damaged.
std::int64_t load_what_is_there(Saver& saver, std::int64_t otherwise) {
  const auto there = saver.by_name() ? saver.target() : saver.project() / "checkpoints";
  std::error_code missing;
  const bool saved = fs::exists(there) && !fs::is_empty(there, missing);
  if (!saver.accelerator().agree_to_stop(saved)) {
    if (saver.by_name()) saver.save(kBefore, saver.named("before"));
    return 0;
  }
  if (saver.by_name() && saver.load(saver.named("before")) != kBefore) {
    throw std::runtime_error("MIXED: the other folder");
  }
  try {
    const auto number = saver.load(saver.target());
    saver.report("loaded " + std::to_string(number));
    return number;
  } catch (const Error& error) {
    saver.report(std::string("damaged ") + error.what());
    if (!saver.by_name()) throw;
    return otherwise;  // the next save replaces it
  }
}

void save_for_ever(Saver& saver, const Settings& settings) {
  auto number = load_what_is_there(saver, settings.number("number", 0));
  std::cout << "rank " << saver.accelerator().process_index() << " is process " << ::getpid()
            << std::endl;
  const int saves = settings.number("saves", 1'000'000);
  for (int i = 0; i < saves; ++i) {
    saver.save(++number, saver.target());
    if (i == 0) saver.report_leftovers();
    saver.report("published " + std::to_string(number));
  }
}

// ---- to meet faults -----------------------------------------------------------------------------

template <class Function>
Function* shim(const char* name) {
  auto* const found = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
  if (found == nullptr) throw std::runtime_error(std::string("No ") + name + ": no LD_PRELOAD");
  return found;
}

/// Faults at call after call of a save, on one rank.
class Faults {
 public:
  /// `unlisted`: the folder that is replaced has no manifest, as if Python had written it.
  Faults(Saver& saver, int rank, int error, bool unlisted)
      : saver_(saver),
        rank_(rank),
        error_(error),
        unlisted_(unlisted),
        index_(saver.accelerator().process_index()) {}

  /// A save with a fault at this call. False if the save has fewer calls.
  bool meet(int call) {
    saver_.save(++number_, saver_.target());  // the fault before has no consequences
    const auto before = number_;
    if (unlisted_ && index_ == 0) fs::remove(saver_.target() / "accelerate_state.json");
    saver_.accelerator().wait_for_everyone();
    std::string thrown;
    const bool here = index_ == rank_;
    if (here) arm_(call, error_);
    try {
      saver_.save(++number_, saver_.target());
    } catch (const CheckpointError& error) {
      thrown = error.what();
      expect(here, "CheckpointError on another rank: " + thrown);
      expect(error.path().string().find(saver_.project().string()) == 0, "no path: " + thrown);
    } catch (const CommError& error) {
      thrown = error.what();
      expect(!here && error.rank() == rank_, "CommError on the failing rank: " + thrown);
    } catch (const std::exception& error) {
      thrown = error.what();
      expect(false, "another kind of error: " + thrown);
    }
    if (here) arm_(0, 0);
    const std::string fired = here ? fired_() : "";
    const bool met = saver_.accelerator().agree_to_stop(!fired.empty());
    what_ = fired + " (" + std::to_string(call) + ")";
    if (!met) {
      expect(thrown.empty(), "it throws without a fault: " + thrown);
      return false;
    }
    ++(thrown.empty() ? unseen : seen);
    if (!thrown.empty()) {
      expect(thrown.find(saver_.project().string()) != std::string::npos, "no path: " + thrown);
      expect(thrown.find(error_ == kShortWrite ? "?" : std::strerror(error_)) != std::string::npos,
             "no reason: " + thrown);
      expect(error_ != EINTR && error_ != kShortWrite, "it is visible: " + thrown);
    }
    look_at_result(before, thrown);
    return true;
  }

  int seen = 0;
  int unseen = 0;
  int failures = 0;

 private:
  void look_at_result(std::int64_t before, const std::string& thrown) {
    try {
      const auto found = saver_.load(saver_.target());
      const auto expected = thrown.empty() ? number_ : before;
      // In a folder that the caller named, the last step may have failed.
      const bool allowed = saver_.by_name() && !thrown.empty() && found == number_;
      expect(found == expected || allowed, "save " + std::to_string(found) + " is there, not " +
                                               std::to_string(expected) + "; " + thrown);
    } catch (const Error& error) {
      const std::string text = error.what();
      expect(saver_.by_name() && !thrown.empty() && text.find("damaged") != std::string::npos,
             "it cannot be loaded: " + text + "\n  after: " + thrown);
    }
  }

  void expect(bool holds, const std::string& otherwise) {
    if (holds) return;
    ++failures;
    std::cerr << "rank " << index_ << ", fault on rank " << rank_ << ", "
              << (error_ == kShortWrite ? "short write" : std::strerror(error_)) << ", " << what_
              << ": " << otherwise << std::endl;
  }

  Saver& saver_;
  int rank_;
  int error_;
  bool unlisted_;
  int index_;
  FaultArm* arm_ = shim<FaultArm>("fault_arm");
  FaultFired* fired_ = shim<FaultFired>("fault_fired");
  std::int64_t number_ = 0;
  std::string what_;
};

int meet_faults(Saver& saver, const Settings& settings) {
  int seen = 0;
  int unseen = 0;
  int failures = 0;
  const int stride = settings.number("stride", 1);
  for (int rank = 0; rank < saver.accelerator().num_processes(); ++rank) {
    for (const int error : {ENOSPC, EIO, EACCES, EINTR, kShortWrite}) {
      Faults faults(saver, rank, error, settings.number("unlisted", 0) != 0);
      int call = 1 + settings.number("first", 0) % stride;
      while (faults.meet(call)) call += stride;
      seen += faults.seen;
      unseen += faults.unseen;
      failures += faults.failures;
    }
  }
  std::ostringstream line;
  line << "faults " << seen + unseen << " of them visible " << seen;
  saver.report(line.str());
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const Settings settings(argc, argv);
  try {
    Saver saver(settings);
    if (settings.number("faults", 0) != 0) return meet_faults(saver, settings) == 0 ? 0 : 1;
    save_for_ever(saver, settings);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
