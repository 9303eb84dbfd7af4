#include "accelerate/state/partial_state.h"

#include <ATen/ATen.h>

#include <iostream>
#include <mutex>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/logging/rich.h"
#include "core/cpu_features.h"
#include "core/log.h"
#include "core/text.h"
#include "state/accelerator_backend.h"
#include "state/partial_facts.h"
#include "state/process_group.h"

namespace accelerate {
namespace detail::state {
namespace {

// Readers only load the pointer. Facts that were reset are kept, since a reader may still hold
// them: a reset is for tests and the facts are small.
struct Slot {
  std::mutex mutex;
  std::atomic<PartialFacts*> current = nullptr;
  std::vector<std::unique_ptr<PartialFacts>> all;
  std::vector<c10::intrusive_ptr<c10d::Store>> retired_stores;
};

Slot& slot() {
  static auto* const the_slot = new Slot;  // never destroyed: threads may read it until the end
  return *the_slot;
}

// What shall be ended: the default group, which then is no more, or `wanted` if that is another.
DefaultGroup take_default_group(const Lent<c10d::ProcessGroup>& wanted) {
  const std::lock_guard lock(slot().mutex);
  if (default_group().group) default_group().owner.refuse_forked_copy("destroy_process_group");
  if (wanted && wanted.get() != default_group().group) return {.group = wanted.get()};
  DefaultGroup own = std::exchange(default_group(), {});
  // Others may still be leaving, or be in the next world already, through the store that we serve.
  if (own.store) slot().retired_stores.push_back(own.store);
  return own;
}

c10::intrusive_ptr<c10d::ProcessGroup> living_group(const PartialState& state) {
  if (auto group = state.process_group()) return group;
  throw StateError(
      "wait_for_everyone: the process group has been destroyed. Wait before "
      "`destroy_process_group()`.");
}

// Runs what a process does for the others while it reports an exception of its own.
template <class F>
void attempt(F&& f) noexcept {
  const auto tell = [](const char* why) {
    warn(str("the other processes could not be told about a failure: ", why));
  };
  try {
    try {
      f();
    } catch (const std::exception& error) {
      tell(error.what());
    } catch (...) {
      tell("an exception that is no std::exception");
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): not even the warning went through
  }
}

// Returns what to tell the user. Nothing is changed when it throws.
std::vector<std::string> fill_slot(const PartialStateOptions& options) {
  const std::lock_guard lock(slot().mutex);
  if (current_facts() != nullptr) return {};  // another thread was faster
  rich::install();
  Startup startup = start_up(options);
  slot().all.push_back(std::move(startup.facts));
  slot().current.store(slot().all.back().get(), std::memory_order_release);
  return std::move(startup.warnings);
}

/// A backend for the device may have one for the CPU beside it.
bool is_backend_of(const std::string& asked, const PartialFacts& facts) {
  const auto device = c10::DeviceTypeName(facts.device.type(), /*lower_case=*/true);
  const std::string made = facts.backend.value_or("");
  return made == asked || made.starts_with(str(device, ":", asked, ","));
}

}  // namespace

void check_as_made(const PartialStateOptions& options) {
  const PartialFacts& facts = *current_facts();
  const auto check = [](bool fits, const std::string& asked, const std::string& made) {
    if (fits) return;
    throw ConfigError(str(asked, ", but the state of this process is already set up with ", made,
                          " and cannot be changed. Pass it to the first `PartialState` or "
                          "`Accelerator`, or leave it out."));
  };
  check(!options.cpu || facts.device.is_cpu(), "cpu is true", str("device ", facts.device.str()));
  const std::lock_guard lock(slot().mutex);
  const DefaultGroup& own = default_group();
  if (const auto& asked = options.process_group) {
    // A process alone may have done without the group of itself.
    const bool alone = !own.group && asked.get()->getSize() == 1;
    check(alone || asked.get() == own.group, "process_group is given",
          own.group ? "another group" : "no group");
  }
  if (!own.group) return;
  const auto& store = options.store;
  check(!store || store.get().get() == own.told_store, "store is given",
        own.told_store != nullptr ? "another store" : "no store of the program");
  const auto timeout = options.timeout.value_or(facts.timeout);
  check(timeout == facts.timeout, str("timeout is ", timeout.count(), " ms"),
        str(facts.timeout.count(), " ms"));
  if (own.lent) return;  // it has its backend and has met
  const auto backend = options.backend.value_or(own.backend);
  check(is_backend_of(backend, facts), str("backend is '", backend, "'"),
        str("'", own.backend, "'"));
  const auto init_method = options.init_method.value_or(own.init_method);
  check(init_method == own.init_method, str("init_method is '", init_method, "'"),
        str("'", own.init_method, "'"));
}

PartialFacts* current_facts() noexcept { return slot().current.load(std::memory_order_acquire); }

DefaultGroup& default_group() {
  // Never destroyed: `~ProcessGroupGloo` waits for work that may be pending when the program exits.
  static auto* const group = new DefaultGroup;
  return *group;
}

PrecisionType precision_from_environment() {
  constexpr const char* kName = "ACCELERATE_MIXED_PRECISION";
  const auto text = Environment::process().get(kName);
  return text ? from_string<PrecisionType>(to_lower(*text), kName) : PrecisionType::kNo;
}

}  // namespace detail::state

using detail::str;

PartialStateOptions PartialStateOptions::from(const InitProcessGroupKwargs& kwargs) {
  // A timeout that is left out stays unset: it follows the backend that is chosen.
  return {.backend = kwargs.backend, .init_method = kwargs.init_method, .timeout = kwargs.timeout};
}

PartialState::PartialState(const PartialStateOptions& options) {
  const bool fork_launched =
      parse_flag_from_env("FORK_LAUNCHED");  // throws before there is a state
  const bool is_first = detail::state::current_facts() == nullptr;
  std::vector<std::string> warnings;
  if (is_first) warnings = detail::state::fill_slot(options);
  facts("fork_launched").fork_launched = fork_launched;
  // Only now, so that the logger knows which process speaks.
  for (const auto& text : warnings) detail::warn(text);
  if (is_first && detail::avoids_amx()) {
    detail::info(str("This processor announces AMX but hides its tile palettes, so ",
                     detail::kOnednnIsaVariable, "=", detail::kOnednnIsaWithoutAmx,
                     " was set when the library was loaded. Set the variable yourself to choose "
                     "other instruction sets."));
  }
}

bool PartialState::initialized() noexcept { return detail::state::current_facts() != nullptr; }

void PartialState::_reset_state() {
  const std::lock_guard lock(detail::state::slot().mutex);
  detail::state::slot().current.store(nullptr, std::memory_order_release);
}

detail::state::PartialFacts& PartialState::facts(const char* attribute) const {
  auto* facts = detail::state::current_facts();
  const bool is_accelerator = std::string_view(owner_) == "AcceleratorState";
  if (facts != nullptr && (!is_accelerator || detail::state::accelerator_state_exists()))
    return *facts;
  throw StateError(str("`", owner_, "` object has no attribute `", attribute,
                       "`. This happens if `", owner_,
                       "._reset_state()` was called and no `Accelerator` or `PartialState` was "
                       "made afterwards. Make one first."));
}

c10::Device PartialState::device() const { return facts("device").device; }
c10::Device PartialState::default_device() const { return detail::state::choose_default_device(); }
DistributedType PartialState::distributed_type() const { return facts("distributed_type").type; }
std::optional<std::string> PartialState::backend() const { return facts("backend").backend; }
int PartialState::num_processes() const { return facts("num_processes").num_processes; }
int PartialState::process_index() const { return facts("process_index").process_index; }
int PartialState::local_process_index() const {
  return facts("local_process_index").local_process_index;
}
bool PartialState::debug() const { return facts("debug").debug; }
void PartialState::set_debug(bool enabled) { facts("debug").debug = enabled; }
bool PartialState::fork_launched() const { return facts("fork_launched").fork_launched; }
const std::string& PartialState::host_name() const { return facts("host_name").host_name; }
std::chrono::milliseconds PartialState::timeout() const { return facts("timeout").timeout; }
std::optional<int> PartialState::num_machines() const { return facts("num_machines").num_machines; }
std::optional<int> PartialState::local_num_processes() const {
  return facts("local_num_processes").local_num_processes;
}

PrecisionType PartialState::mixed_precision() const {
  (void)facts("mixed_precision");
  const auto precision = detail::state::accelerator_precision();
  return precision ? *precision : detail::state::precision_from_environment();
}

bool PartialState::use_distributed() const { return facts("use_distributed").use_distributed(); }

bool PartialState::is_last_process() const { return facts("is_last_process").is_last_process(); }

bool PartialState::is_main_process() const { return facts("is_main_process").is_main_process(); }

bool PartialState::is_local_main_process() const {
  return facts("is_local_main_process").is_local_main_process();
}

c10::intrusive_ptr<c10d::ProcessGroup> PartialState::process_group() const {
  (void)facts("process_group");
  const std::lock_guard lock(detail::state::slot().mutex);
  const auto& own = detail::state::default_group();
  if (own.group) own.owner.refuse_forked_copy("the process group");
  return own.group;
}

c10::intrusive_ptr<c10d::Store> PartialState::store() const {
  (void)facts("store");
  const std::lock_guard lock(detail::state::slot().mutex);
  const auto& own = detail::state::default_group();
  if (own.store) own.owner.refuse_forked_copy("the store of the process group");
  return own.store;
}

void PartialState::wait_for_everyone(std::source_location where) const {
  const auto& facts = this->facts("wait_for_everyone");
  if (!facts.use_distributed()) return;
  detail::state::barrier(detail::state::living_group(*this), facts.device, facts.timeout, where);
}

void PartialState::set_device() {
  const auto& facts = this->facts("device");
  auto* backend = detail::state::accelerator_backend();
  if (backend != nullptr && facts.device.type() == backend->type() && facts.device.has_index()) {
    backend->set_device(facts.device.index());
  }
}

void PartialState::destroy_process_group(const Lent<c10d::ProcessGroup>& group) {
  if (fork_launched() && !group) return;
  const detail::state::DefaultGroup own = detail::state::take_default_group(group);
  if (own.group && !own.lent) detail::state::shut_down(own.group);
}

detail::state::SplitShare PartialState::share(SplitOptions options) const {
  const auto& facts = this->facts("split_between_processes");
  return {.num_processes = facts.num_processes,
          .process_index = facts.process_index,
          .options = options,
          .device = facts.device};
}

std::ostream& operator<<(std::ostream& out, const PartialState& state) {
  out << "Distributed environment: DistributedType." << state.distributed_type();
  if (const auto backend = state.backend()) out << "  Backend: " << *backend;
  return out << "\nNum processes: " << state.num_processes()
             << "\nProcess index: " << state.process_index()
             << "\nLocal process index: " << state.local_process_index()
             << "\nDevice: " << state.device() << "\n";
}

void wait_for_everyone(std::source_location where) { PartialState().wait_for_everyone(where); }

namespace detail::state {

OrderedSection::OrderedSection(const PartialState& state, std::source_location where)
    : state_(state), where_(where) {
  (void)state.num_processes();  // throws while there is no state
  key_ = str("section/", current_facts()->sections++);
}

std::string OrderedSection::message_key(int rank) const { return str(key_, "/", rank); }

// Empty where there is no store to leave it in.
std::string OrderedSection::message_of(int rank) const {
  const auto store = state_.store();
  if (!store) return "";
  try {
    // It was put down before the all-reduce, or never.
    if (!store->check({message_key(rank)})) return "";
    const auto bytes = store->get(message_key(rank));
    return {bytes.begin(), bytes.end()};
  } catch (const std::exception& error) {
    return str("its message could not be read (", error.what(), ")");
  }
}

std::optional<OrderedSection::Failure> OrderedSection::agree(bool failed_here) const {
  if (!state_.use_distributed()) return std::nullopt;
  const std::int64_t own = failed_here ? state_.process_index() + 1 : 0;
  // Ranks may come to the section from different branches.
  const auto named = name_collectives("main_process_first");
  const auto largest =
      all_reduce_max(living_group(state_), own, state_.device(), state_.timeout(), where_);
  // Usually the store is not touched: rank 0, which serves it, may end as soon as it is through.
  if (largest == 0) return std::nullopt;
  const int rank = static_cast<int>(largest) - 1;
  Failure failure{rank, message_of(rank)};
  state_.wait_for_everyone(where_);  // so that the store is there until all have read
  return failure;
}

void OrderedSection::wait_for_the_first() {
  const auto failure = agree(/*failed_here=*/false);
  if (!failure) return;
  throw CommError(
      str("rank ", failure->rank, ", which goes first at ", where_.file_name(), ":", where_.line(),
          ", failed there", failure->message.empty() ? "." : ": ", failure->message),
      failure->rank);
}

void OrderedSection::release_the_others() { (void)agree(/*failed_here=*/false); }

void OrderedSection::fail(const std::string& message) noexcept {
  attempt([&] {
    const auto store = state_.use_distributed() ? state_.store() : nullptr;
    if (!store) return;
    store->set(message_key(state_.process_index()),
               std::vector<std::uint8_t>(message.begin(), message.end()));
  });
  attempt([&] { (void)agree(/*failed_here=*/true); });
}

void print_line(std::string line) {
  line.push_back('\n');
  std::cout << line << std::flush;
}

}  // namespace detail::state
}  // namespace accelerate
