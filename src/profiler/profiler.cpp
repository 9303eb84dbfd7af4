// Recordings by Kineto, as torch.profiler makes them.
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "accelerate/accelerator/profiler.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "comm/collective_totals.h"
#include "core/json.h"
#include "core/log.h"
#include "core/supported.h"
#include "core/text.h"
#include "profiler/event_tree.h"
#include "profiler/profile_schedule.h"
#include "state/accelerator_backend.h"

// torch/csrc/profiler/kineto_shim.h, which declares them, needs headers that LibTorch keeps in a
// folder of their own.
namespace torch::autograd::profiler {
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
TORCH_API void profilerStep();
}  // namespace torch::autograd::profiler

namespace accelerate {
namespace {

namespace kineto = torch::autograd::profiler;
using detail::str;
using detail::profiler::Action;
using detail::profiler::MemoryEvent;
using detail::profiler::ProfileEvent;
using detail::profiler::Transition;

constexpr std::string_view kMemoryEvent = "[memory]";

/// Events that the profiler itself makes, or that say nothing.
bool is_hidden(const kineto::KinetoEvent& event, const std::string& name) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"[OutOfMemory]", "profiler::_record_function_enter", "profiler::_record_function_enter_new",
       "profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version"});
  return event.isHiddenEvent() || std::ranges::find(kNames, name) != kNames.end();
}

std::set<kineto::ActivityType> activities_of(const ProfileKwargs& options) {
  const auto* gpu = detail::state::accelerator_backend();
  std::set<kineto::ActivityType> result;
  if (!options.activities) {
    result.insert(kineto::ActivityType::CPU);
    if (gpu != nullptr) result.insert(kineto::ActivityType::CUDA);
    return result;
  }
  for (const auto activity : *options.activities) {
    detail::require_supported(activity);
    if (activity == ProfilerActivity::kCpu) {
      result.insert(kineto::ActivityType::CPU);
    } else if (activity == ProfilerActivity::kCuda && gpu != nullptr) {
      result.insert(kineto::ActivityType::CUDA);
    } else {
      throw UnsupportedError(str("The profiler activity '", activity,
                                 "' is not available on this machine. Choose from: cpu",
                                 gpu != nullptr ? ", cuda." : "."));
    }
  }
  return result;
}

/// Without a GPU Kineto writes an error to stderr, that it has found none, when it is first used.
void quieten_kineto() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (detail::state::accelerator_backend() == nullptr)
      ::setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
  });
}

}  // namespace

class Profiler::Impl {
 public:
  explicit Impl(const ProfileKwargs& options)
      : options_(resolved(options)), activities_(activities_of(options_)) {
    options_.record_shapes = options_.record_shapes || options_.with_flops;
    if (options_.with_stack || options_.with_modules) {
      detail::warn_once(
          "with_stack and with_modules of ProfileKwargs: LibTorch records call stacks and modules "
          "of TorchScript only. Name parts of a C++ program by RECORD_FUNCTION(\"name\", {}).");
    }
  }

  /// Ends what runs, and drops it.
  ~Impl() {
    try {
      step_range_.reset();
      if (recording_) static_cast<void>(kineto::disableProfiler());
      if (recording_) detail::comm::count_collectives(false);
    } catch (...) {  // NOLINT(bugprone-empty-catch): a destructor cannot report it
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void start(Profiler& self) {
    if (running_) throw StateError("start: this profiler runs already.");
    step_ = 0;
    action_ = Action::kNone;
    running_ = true;
    try {
      move_to(self, action_at(0));
    } catch (...) {
      running_ = false;
      throw;
    }
    begin_step();
  }
  void stop(Profiler& self) {
    if (!running_) return;
    step_range_.reset();
    running_ = false;
    carry_out(self, detail::profiler::last_transitions(std::exchange(action_, Action::kNone)));
  }
  void step(Profiler& self) {
    if (!running_) throw StateError("step: the profiler does not run. Call start() first.");
    step_range_.reset();
    ++step_;
    move_to(self, action_at(step_));
    kineto::profilerStep();
    begin_step();
  }
  [[nodiscard]] std::int64_t step_num() const { return step_; }

  [[nodiscard]] KeyAverages key_averages(bool group_by_input_shape) const {
    require_result("key_averages");
    std::vector<ProfileEvent> events;
    std::vector<MemoryEvent> memory;
    for (const auto& event : result_->events()) {
      auto name = event.name();
      if (name == kMemoryEvent) {
        memory.push_back({.thread = event.startThreadId(),
                          .time = static_cast<std::int64_t>(event.startNs()),
                          .bytes = event.nBytes(),
                          .on_device = event.deviceType() != c10::DeviceType::CPU});
      } else if (!is_hidden(event, name)) {
        events.push_back(event_of(event, std::move(name)));
      }
    }
    std::vector<CollectiveAverage> collectives;
    for (const auto& one : collectives_) {
      collectives.push_back({.key = one.kind,
                             .count = one.calls,
                             .bytes = one.bytes,
                             .time_total = static_cast<double>(one.under_way.count()) / 1000});
    }
    auto rows = detail::profiler::average_events(std::move(events), std::move(memory),
                                                 group_by_input_shape);
    return KeyAverages(std::move(rows), std::move(collectives),
                       activities_.contains(kineto::ActivityType::CUDA) ? "CUDA" : "",
                       options_.profile_memory);
  }

  void export_chrome_trace(const std::filesystem::path& path) {
    require_result("export_chrome_trace");
    if (path.extension() == ".gz") {
      throw ArgumentError(str("export_chrome_trace: '", path.string(),
                              "' would be compressed, which is not supported. Leave .gz away, and "
                              "compress the file afterwards."));
    }
    std::error_code error;
    if (written_.empty()) {
      result_->save(path.string());  // which can be done once
      if (!std::filesystem::exists(path, error))
        refuse_file(path, "it cannot be opened for writing");
      written_ = path;
      return;
    }
    if (path == written_) return;
    std::filesystem::copy_file(written_, path, std::filesystem::copy_options::overwrite_existing,
                               error);
    if (error)
      refuse_file(path, str("the trace is in '", written_.string(),
                            "' and cannot be copied: ", error.message()));
  }
  void add_metadata_json(const std::string& key, const std::string& json) {
    static_cast<void>(detail::json_loads(json, str("The metadata '", key, "' of a profile")));
    metadata_.emplace_back(key, json);
  }

 private:
  [[nodiscard]] Action action_at(std::int64_t step) const {
    return options_.schedule_option ? detail::profiler::action_at(*options_.schedule_option, step)
                                    : Action::kRecord;
  }
  void move_to(Profiler& self, Action next) {
    const auto from = std::exchange(action_, next);
    carry_out(self, detail::profiler::transitions(from, next));
  }
  void carry_out(Profiler& self, std::span<const Transition> what) {
    for (const auto each : what) {
      switch (each) {
        case Transition::kPrepare:
          prepare();
          break;
        case Transition::kStart:
          record();
          break;
        case Transition::kStop:
          end_record();
          break;
        case Transition::kTraceReady:
          if (options_.on_trace_ready) options_.on_trace_ready(self);
          break;
        case Transition::kWarn:
          detail::warn("The schedule of the profiler ends a recording before its last step.");
          break;
      }
    }
  }
  void prepare() {
    quieten_kineto();
    if (torch::profiler::impl::profilerEnabled()) {
      throw StateError(
          "profile: a profiler runs already on this thread. End it first: profiles cannot be "
          "nested.");
    }
    kineto::prepareProfiler(config(), activities_);
  }
  void record() {
    kineto::enableProfiler(config(), activities_);
    recording_ = true;
    detail::comm::count_collectives(true);
    add_facts();
  }
  void end_record() {
    recording_ = false;
    result_ = kineto::disableProfiler();
    collectives_ = detail::comm::collective_totals();
    detail::comm::count_collectives(false);
    written_.clear();
  }
  /// What torch.profiler writes into its traces.
  void add_facts() {
    const auto flag = [](bool on) { return on ? "1" : "0"; };
    kineto::addMetadataJson("profile_memory", flag(options_.profile_memory));
    kineto::addMetadataJson("with_stack", flag(options_.with_stack));
    kineto::addMetadataJson("record_shapes", flag(options_.record_shapes));
    kineto::addMetadataJson("with_modules", flag(options_.with_modules));
    kineto::addMetadataJson("with_flops", flag(options_.with_flops));
    if (PartialState::initialized() && PartialState().use_distributed()) {
      const PartialState state;
      kineto::addMetadataJson("distributedInfo",
                              str("{\"backend\": \"", state.backend().value_or(""),
                                  "\", \"rank\": ", state.process_index(),
                                  ", \"world_size\": ", state.num_processes(), "}"));
    }
    for (const auto& [key, json] : metadata_) kineto::addMetadataJson(key, json);
  }
  [[nodiscard]] kineto::ProfilerConfig config() const {
    return kineto::ProfilerConfig(kineto::ProfilerState::KINETO, options_.record_shapes,
                                  options_.profile_memory, options_.with_stack, options_.with_flops,
                                  options_.with_modules);
  }
  void begin_step() {
    if (!options_.schedule_option) return;
    step_range_.emplace(at::RecordScope::USER_SCOPE);
    if (step_range_->isActive()) step_range_->before(str("ProfilerStep#", step_));
  }
  static ProfileEvent event_of(const kineto::KinetoEvent& event, std::string name) {
    if (name.starts_with("ProfilerStep#")) name = "ProfilerStep*";
    return {.name = std::move(name),
            .thread = event.startThreadId(),
            .start = static_cast<std::int64_t>(event.startNs()),
            .end = static_cast<std::int64_t>(event.endNs()),
            .on_device = event.deviceType() != c10::DeviceType::CPU,
            .async = event.isAsync() || event.startThreadId() != event.endThreadId(),
            .id = event.correlationId(),
            .launched_by = event.linkedCorrelationId(),
            .shapes = event.shapes().vec(),
            .flops = static_cast<std::int64_t>(event.flops()),
            .stack = event.stack().vec()};
  }
  void require_result(const char* what) const {
    if (result_) return;
    throw StateError(str(what,
                         ": nothing is recorded yet. A recording ends with the scope of "
                         "profile(), or with the last active step of its schedule."));
  }
  [[noreturn]] static void refuse_file(const std::filesystem::path& path, const std::string& why) {
    throw ArgumentError(
        str("export_chrome_trace: '", path.string(), "' is not written: ", why, "."));
  }

  ProfileKwargs options_;
  std::set<kineto::ActivityType> activities_;
  std::vector<std::pair<std::string, std::string>> metadata_ = {};
  bool running_ = false;
  bool recording_ = false;
  std::int64_t step_ = 0;
  Action action_ = Action::kNone;
  std::optional<at::RecordFunction> step_range_ = std::nullopt;
  std::unique_ptr<kineto::ProfilerResult> result_ = nullptr;
  std::vector<detail::comm::CollectiveTotal> collectives_ = {};
  std::filesystem::path written_ = {};
};

Profiler::Profiler(const ProfileKwargs& options) : impl_(std::make_unique<Impl>(options)) {}
Profiler::Profiler(Profiler&&) noexcept = default;
Profiler& Profiler::operator=(Profiler&&) noexcept = default;
Profiler::~Profiler() = default;

void Profiler::start() { impl_->start(*this); }
void Profiler::stop() { impl_->stop(*this); }
void Profiler::step() { impl_->step(*this); }
std::int64_t Profiler::step_num() const { return impl_->step_num(); }

KeyAverages Profiler::key_averages(bool group_by_input_shape) const {
  return impl_->key_averages(group_by_input_shape);
}

void Profiler::export_chrome_trace(const std::filesystem::path& path) {
  impl_->export_chrome_trace(path);
}

void Profiler::add_metadata_json(const std::string& key, const std::string& json) {
  impl_->add_metadata_json(key, json);
}

}  // namespace accelerate
