// Saving and loading the state of a run: `save_state`, `load_state`.
#include "accelerator/run_state.h"

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <mutex>
#include <ranges>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/version.h"
#include "accelerator/accelerator_core.h"
#include "accelerator/accumulated_gradients.h"
#include "accelerator/model_fp8.h"
#include "core/byte_bar.h"
#include "core/files.h"
#include "core/log.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "state/partial_facts.h"

namespace accelerate {

namespace fs = std::filesystem;
using detail::str;
using detail::accelerator::AcceleratorCore;
using detail::checkpoint::Exchange;
using detail::checkpoint::SaveJob;
using detail::checkpoint::SaveTarget;
using detail::checkpoint::StoreExchange;
using detail::formats::Manifest;
using detail::formats::VerifyDepth;

namespace detail::accelerator {

struct RunState::Living {
  std::mutex mutex;
  std::vector<RunState*> all;
};

RunState::Living& RunState::living() {
  static auto& living = *new Living;  // never destroyed: an accelerator may be static too
  return living;
}

RunState::RunState() {
  const std::lock_guard lock(living().mutex);
  living().all.push_back(this);
}

RunState::~RunState() {
  {
    const std::lock_guard lock(living().mutex);
    std::erase(living().all, this);
  }
  // Where an error ends the program, other processes may be gone and will not answer.
  if (std::uncaught_exceptions() > 0) thread_.request_stop();
  wait_and_warn();
}

void RunState::wait_and_warn() {
  try {
    wait();
  } catch (const std::exception& error) {
    warn_from_any_rank(str("The last asynchronous save_state failed: ", error.what()));
  }
}

void RunState::wait_and_warn_all() {
  const std::lock_guard lock(living().mutex);
  for (auto* const one : living().all) one->wait_and_warn();
}

void RunState::start(std::unique_ptr<checkpoint::SaveJob> job, const StoreExchange& where) {
  thread_ = std::jthread([this, where, job = std::move(job)](std::stop_token stop) mutable {
    try {
      checkpoint::StoreRounds rounds(where, std::move(stop));
      job->run([&](const auto& encode) { return rounds.exchange(encode); }, /*buffers=*/nullptr);
      rounds.finish();
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void RunState::wait() {
  if (thread_.joinable()) thread_.join();
  if (const auto failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

namespace {

// ---- hooks --------------------------------------------------------------------------------------

template <class Hook>
RemovableHandle add_hook(const std::shared_ptr<HookList<Hook>>& hooks, Hook hook) {
  static std::atomic<std::int64_t> registrations = 0;
  const auto number = ++registrations;
  hooks->emplace(number, std::move(hook));
  return RemovableHandle([weak = std::weak_ptr(hooks), number] {
    if (const auto list = weak.lock()) list->erase(number);
  });
}

template <class Hook, class... Args>
void call_hooks(const std::shared_ptr<HookList<Hook>>& hooks, Args&... args) {
  auto now = *hooks;  // a hook may register or remove some
  for (auto& [number, hook] : now) hook(args...);
}

// ---- save ---------------------------------------------------------------------------------------

SaveTarget target_of(const AcceleratorCore& core, const fs::path& output_dir) {
  const auto& project = core.project;
  if (!project.automatic_checkpoint_naming) {
    if (output_dir.empty()) {
      throw ArgumentError(
          "save_state: no folder is given. Name one, or set automatic_checkpoint_naming and "
          "project_dir of the ProjectConfiguration.");
    }
    return {.folder = expand_user(output_dir.string(), Environment::process())};
  }
  if (!project.project_dir) {
    throw ArgumentError(
        "save_state: automatic_checkpoint_naming needs a project_dir, in the AcceleratorOptions or "
        "the ProjectConfiguration.");
  }
  return {.folder = *project.project_dir / "checkpoints" / str("checkpoint_", project.iteration),
          .automatic = true,
          .total_limit = project.total_limit};
}

Manifest facts_of(const AcceleratorCore& core) {
  using Seconds = std::chrono::duration<double>;
  return {.accelerate_version = std::string(kVersion),
          .torch_version = TORCH_VERSION,
          .saved_at = Seconds(std::chrono::system_clock::now().time_since_epoch()).count(),
          .num_processes = core.state.num_processes(),
          .iteration = core.project.iteration,
          .step = core.step};
}

EntryOptions entry_options(const AcceleratorCore& core, bool strict = true) {
  return {.strict = strict,
          .positions = core.options.dataloader_config.use_stateful_dataloader,
          .loaders_per_process = core.state.num_processes() > 1};
}

std::vector<checkpoint::StateFile> files_to_save(AcceleratorCore& core, const SaveJob& job,
                                                 bool safe_serialization) {
  std::vector<std::shared_ptr<torch::nn::Module>> models;
  std::vector<StateDict> weights;
  for (const auto& model : core.registry.models) {
    models.push_back(model->module);
    // As in Python, hooks do not see the weights of sharded models.
    if (sharded_state_of(*model)) continue;
    weights.push_back(state_dict_of(model->module, model, /*unwrap=*/true));
  }
  call_hooks(core.run_state.save_hooks, models, weights, job.place());
  auto entries = core.registry.entries(entry_options(core));
  entries.push_back(gradients_entry(core.registry, !core.gradient_state.sync_gradients()));
  entries.push_back(buffers_entry(core.registry, core.state.process_index()));
  entries.push_back(fp8_entry(core.registry));
  return checkpoint::files_of_process(
      weights, entries,
      {.process_index = core.state.process_index(),
       // Not twice into a folder that nodes share.
       .save_on_each_node = core.project.save_on_each_node && job.owner() != 0,
       .safe_serialization = safe_serialization});
}

StoreExchange store_exchange(const AcceleratorCore& core) {
  const auto group = core.state.process_group();
  return {.store = group ? group->getStore() : nullptr,
          .prefix = str("accelerate/save_state/", RunState::saves),
          .rank = core.state.process_index(),
          .size = core.state.num_processes(),
          .timeout = state::current_facts()->timeout};
}

/// Whether tensors have to be brought from a device, through buffers that it can write to.
bool is_on_device(const AcceleratorCore& core) { return !core.state.device().is_cpu(); }

// ---- load ---------------------------------------------------------------------------------------

/// What is wrong with the files of a checkpoint; empty if nothing is, or nothing is known.
std::vector<std::string> problems_of(const fs::path& folder, const LoadStateOptions& options) {
  try {
    const auto manifest = formats::read_manifest(folder);
    if (!manifest) return {};
    if (!options.verify) return formats::verify_manifest(folder, *manifest, VerifyDepth::kSizes);
    std::int64_t bytes = 0;
    for (const auto& file : manifest->files) bytes += file.size;
    ByteBar bar("verifying", bytes, options.progress);
    return formats::verify_manifest(folder, *manifest, VerifyDepth::kSums, bar.next_part());
  } catch (const CheckpointError& error) {
    return {error.what()};
  }
}

/// What `load_state` loads.
struct ChosenCheckpoint {
  fs::path folder;
  /// The first number behind all checkpoints of the project, also damaged ones.
  std::int64_t next = 0;
};

/// Collective. The newest checkpoint that is complete on all hosts, of which the first processes
/// look at it.
ChosenCheckpoint newest_checkpoint(const AcceleratorCore& core, const LoadStateOptions& options,
                                   const Exchange& exchange) {
  const auto& project = core.project;
  if (!project.automatic_checkpoint_naming || !project.project_dir) {
    throw ArgumentError(
        "load_state: no folder is given and automatic checkpoint naming is off. Name a folder, or "
        "set automatic_checkpoint_naming and project_dir of the ProjectConfiguration.");
  }
  const auto folder = *project.project_dir / "checkpoints";
  const bool looks = core.state.is_local_main_process();
  const auto lists = exchange([&] {
    if (!looks) return std::string();
    std::string names = ":";
    for (const auto& one : formats::numbered_checkpoints(folder)) {
      names += one.path.filename().string() + ":";
    }
    return names;
  });
  std::int64_t next = 0;
  for (const auto& list : lists) {
    for (const auto& name : split(list, ':')) {
      if (name.empty()) continue;
      next = std::max<std::int64_t>(next, std::stoll(name.substr(name.find('_') + 1)) + 1);
    }
  }
  auto names = split(lists.front(), ':');
  std::erase_if(names, [&](const auto& name) {
    return name.empty() || std::ranges::any_of(lists, [&](const auto& list) {
             return !list.empty() && list.find(str(":", name, ":")) == std::string::npos;
           });
  });
  for (const auto& name : std::views::reverse(names)) {
    const auto problems = exchange([&] {
      const auto found = looks ? problems_of(folder / name, options) : std::vector<std::string>();
      return found.empty() ? std::string() : found.front();
    });
    const auto problem = std::ranges::find_if_not(problems, &std::string::empty);
    if (problem == problems.end()) return {.folder = folder / name, .next = next};
    warn(str("The checkpoint '", (folder / name).string(),
             "' is damaged and passed over: ", *problem));
  }
  throw ArgumentError(str("load_state: '", folder.string(), "' has no ",
                          lists.front() == ":" ? "" : "complete ", "checkpoint. Save one first."));
}

/// Collective. The folder, after the first process of each host has looked at it.
ChosenCheckpoint agreed_folder(const AcceleratorCore& core, const fs::path& input_dir,
                               const LoadStateOptions& options, const Exchange& exchange) {
  if (input_dir.empty()) return newest_checkpoint(core, options, exchange);
  const auto folder = expand_user(input_dir.string(), Environment::process());
  exchange([&] {
    std::error_code error;
    if (!fs::is_directory(folder, error)) {
      throw ArgumentError(str("Tried to find ", folder.string(), " but folder does not exist"));
    }
    if (!core.state.is_local_main_process()) return std::string();
    const auto problems = problems_of(folder, options);
    if (!problems.empty()) {
      throw CheckpointError(str("The checkpoint '", folder.string(),
                                "' is damaged: ", join(problems, "; "), ". Load an older one."),
                            folder);
    }
    return std::string();
  });
  return {.folder = folder};
}

void check_custom_objects(const AcceleratorCore& core, const fs::path& folder) {
  std::size_t found = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    constexpr std::string_view kBegin = "custom_checkpoint_";
    constexpr std::string_view kEnd = ".pkl";
    if (!name.starts_with(kBegin) || !name.ends_with(kEnd)) continue;
    const auto digits =
        std::string_view(name).substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size());
    if (!digits.empty() && digits.find_first_not_of("0123456789") == std::string_view::npos)
      ++found;
  }
  const auto registered = core.registry.custom.size();
  if (found == registered) return;
  throw StateError(str("Number of custom checkpoints in folder ", folder.string(),
                       " does not match the number of registered objects:\n  Found checkpoints: ",
                       found, "\n  Registered objects: ", registered,
                       "\nUse the same set of registered objects, in the same order, as when the "
                       "state was saved."));
}

void load_everything(AcceleratorCore& core, const fs::path& folder,
                     const LoadStateOptions& options) {
  std::vector<std::shared_ptr<torch::nn::Module>> models;
  for (const auto& model : core.registry.models) models.push_back(model->module);
  call_hooks(core.run_state.load_hooks, models, folder);

  check_custom_objects(core, folder);
  ObjectRegistry objects = core.registry;
  std::erase_if(objects.models, [&](const auto& model) {
    return std::ranges::find(models, model->module) == models.end();
  });
  const auto manifest = formats::read_manifest(folder);
  const std::int64_t saved_by = manifest ? manifest->num_processes : core.state.num_processes();
  auto entry_settings = entry_options(core, options.strict);
  entry_settings.loaders_per_process &= saved_by == core.state.num_processes();
  auto entries = objects.entries(entry_settings);
  if (saved_by == core.state.num_processes()) {
    entries.push_back(buffers_entry(objects, core.state.process_index()));
  }
  accelerate::load_accelerator_state(folder, entries,
                                     {.process_index = core.state.process_index(),
                                      .map_location = options.map_location,
                                      .strict_rng = options.strict_rng,
                                      .progress = options.progress});
  load_fp8_state(objects, folder, core.state.process_index());
  if (!manifest) return;  // Python saves no gradients, and keeps those that are there
  const auto gradients = gradients_in(folder, core.registry, core.state.process_index(),
                                      core.state.num_processes(), saved_by);
  AccumulatedGradients(core.registry, /*accumulating=*/false).load_state_dict(gradients);
  core.gradient_state._set_sync_gradients(gradients.as_dict().empty());
}

fs::path save_state(AcceleratorCore& core, const fs::path& output_dir,
                    const SaveStateOptions& options, std::source_location where) {
  core.run_state.wait();
  const auto exchange = checkpoint::exchange_by_collective("save_state", where);
  auto target = target_of(core, output_dir);
  target.progress = options.progress;
  auto job = std::make_unique<SaveJob>(target, facts_of(core));
  job->open(exchange);
  info(str("Saving current state to ", target.folder.string()));
  ++RunState::saves;
  const auto store = store_exchange(core);
  bool asynchronous = options.asynchronous;
  if (asynchronous && store.size > 1 && !store.store) {
    asynchronous = false;
    warn_once(
        "save_state: processes cannot agree beside the training thread, because the process group "
        "that was lent has no store. The state is written before save_state returns.");
  }
  // What one process throws here, all do.
  exchange([&] {
    job->add(files_to_save(core, *job, options.safe_serialization));
    if (asynchronous) job->take_snapshot(core.run_state.buffers);
    return std::string();
  });
  ++core.project.iteration;
  if (asynchronous) {
    core.run_state.start(std::move(job), store);
    return target.folder;
  }
  try {
    job->run(exchange, is_on_device(core) ? &core.run_state.buffers : nullptr);
  } catch (...) {
    // Not if another host may have published its files under this name.
    if (job->left_nothing()) --core.project.iteration;
    throw;
  }
  return target.folder;
}

}  // namespace

void check_preemption(AcceleratorCore& core, std::source_location where) {
  const auto& preemption = core.preemption;
  // Processes that are through with uneven inputs wait for the others: all stop after them.
  if (!preemption || core.join != nullptr) return;
  if (!preemption->stops_here(core.backward.synchronized())) return;
  // This process ends here: saves of other accelerators must be complete too. Their failure is no
  // reason not to save now.
  RunState::wait_and_warn_all();
  const auto folder = save_state(core, {}, {}, where);
  if (core.state.is_main_process()) {
    std::cerr << "accelerate: preempted (" << preemption->reason() << "): the state is saved in '"
              << folder.string() << "'.\n";
  }
  if (core.before_exit) core.before_exit();
  core.state.destroy_process_group();
  std::cout.flush();
  std::fflush(nullptr);
  // Not std::exit: threads of the program may still run, and destructors of statics with them.
  std::_Exit(kPreemptedExitCode);
}

}  // namespace detail::accelerator

CheckpointMembers::CheckpointMembers(std::shared_ptr<AcceleratorCore> core)
    : AcceleratorBase(std::move(core)) {}

CheckpointMembers::~CheckpointMembers() = default;

fs::path CheckpointMembers::save_state(const fs::path& output_dir, const SaveStateOptions& options,
                                       std::source_location where) {
  return detail::accelerator::save_state(*core_, output_dir, options, where);
}

fs::path CheckpointMembers::load_state(const fs::path& input_dir, const LoadStateOptions& options,
                                       std::source_location where) {
  wait_for_save_state();
  const auto exchange = detail::checkpoint::exchange_by_collective("load_state", where);
  auto& core = *core_;
  const auto [folder, next] =
      detail::accelerator::agreed_folder(core, input_dir, options, exchange);
  detail::info(str("Loading states from ", folder.string()));
  exchange([&] {
    detail::accelerator::load_everything(core, folder, options);
    return std::string();
  });
  core.project.iteration = std::max(core.project.iteration, next);
  return folder;
}

void CheckpointMembers::wait_for_save_state() { core_->run_state.wait(); }

void CheckpointMembers::check_preemption(std::source_location where) {
  detail::accelerator::check_preemption(*core_, where);
}

void CheckpointMembers::set_save_iteration(std::int64_t iteration) {
  if (iteration < 0) {
    throw ArgumentError(str("set_save_iteration: ", iteration, " is below 0."));
  }
  core_->project.iteration = iteration;
}

RemovableHandle CheckpointMembers::register_save_state_pre_hook(SaveStateHook hook) {
  return detail::accelerator::add_hook(core_->run_state.save_hooks, std::move(hook));
}
RemovableHandle CheckpointMembers::register_load_state_pre_hook(LoadStateHook hook) {
  return detail::accelerator::add_hook(core_->run_state.load_hooks, std::move(hook));
}

std::vector<StateEntry> CheckpointMembers::_state_entries() const {
  return core_->registry.entries();
}

void CheckpointMembers::register_objects(std::vector<std::shared_ptr<Stateful>> objects) {
  std::ranges::move(objects, std::back_inserter(core_->registry.custom));
}

}  // namespace accelerate
