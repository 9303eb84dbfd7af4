#include "accelerate/partial_state.h"

#include <ATen/ATen.h>

#include <iostream>
#include <mutex>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "core/log.h"
#include "core/text.h"
#include "state/accelerator_backend.h"
#include "state/partial_facts.h"
#include "state/process_group.h"

namespace accelerate {
namespace detail {
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

// Returns what to tell the user. Nothing is changed when it throws.
std::vector<std::string> fill_slot(const PartialStateOptions& options) {
  const std::lock_guard lock(slot().mutex);
  if (current_facts() != nullptr) return {};  // another thread was faster
  Startup startup = start_up(options);
  slot().all.push_back(std::move(startup.facts));
  slot().current.store(slot().all.back().get(), std::memory_order_release);
  return std::move(startup.warnings);
}

}  // namespace

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

}  // namespace detail

using detail::str;

PartialStateOptions PartialStateOptions::from(const InitProcessGroupKwargs& kwargs) {
  // A timeout that is left out stays unset: it follows the backend that is chosen.
  return {.backend = kwargs.backend, .init_method = kwargs.init_method, .timeout = kwargs.timeout};
}

PartialState::PartialState(const PartialStateOptions& options) {
  std::vector<std::string> warnings;
  if (detail::current_facts() == nullptr) warnings = detail::fill_slot(options);
  facts("fork_launched").fork_launched = parse_flag_from_env("FORK_LAUNCHED");
  // Only now, so that the logger knows which process speaks.
  for (const auto& text : warnings) detail::warn(text);
}

bool PartialState::initialized() noexcept { return detail::current_facts() != nullptr; }

void PartialState::_reset_state() {
  const std::lock_guard lock(detail::slot().mutex);
  detail::slot().current.store(nullptr, std::memory_order_release);
}

detail::PartialFacts& PartialState::facts(const char* attribute) const {
  auto* facts = detail::current_facts();
  const bool is_accelerator = std::string_view(owner_) == "AcceleratorState";
  if (facts != nullptr && (!is_accelerator || detail::accelerator_state_exists())) return *facts;
  throw StateError(str("`", owner_, "` object has no attribute `", attribute,
                       "`. This happens if `", owner_,
                       "._reset_state()` was called and no `Accelerator` or `PartialState` was "
                       "made afterwards. Make one first."));
}

c10::Device PartialState::device() const { return facts("device").device; }
c10::Device PartialState::default_device() const { return detail::choose_default_device(); }
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
  const auto precision = detail::accelerator_precision();
  return precision ? *precision : detail::precision_from_environment();
}

bool PartialState::use_distributed() const {
  const auto& facts = this->facts("use_distributed");
  return facts.type != DistributedType::kNo && facts.num_processes > 1;
}

bool PartialState::is_last_process() const {
  const auto& facts = this->facts("is_last_process");
  return facts.process_index == facts.num_processes - 1;
}

bool PartialState::is_main_process() const {
  const auto& facts = this->facts("is_main_process");
  return facts.type == DistributedType::kMegatronLm ? is_last_process() : facts.process_index == 0;
}

bool PartialState::is_local_main_process() const {
  const auto& facts = this->facts("is_local_main_process");
  return facts.type == DistributedType::kMegatronLm ? is_last_process()
                                                    : facts.local_process_index == 0;
}

const c10::intrusive_ptr<c10d::ProcessGroup>& PartialState::process_group() const {
  (void)facts("process_group");
  return detail::default_group().group;
}

const c10::intrusive_ptr<c10d::Store>& PartialState::store() const {
  (void)facts("store");
  return detail::default_group().store;
}

void PartialState::wait_for_everyone(std::source_location where) const {
  const auto& facts = this->facts("wait_for_everyone");
  if (facts.type == DistributedType::kNo || facts.num_processes == 1) return;
  const auto& group = detail::default_group().group;
  if (!group) {
    throw StateError(
        "wait_for_everyone: the process group has been destroyed. Wait before "
        "`destroy_process_group()`.");
  }
  detail::barrier(group, facts.device, facts.timeout, where);
}

void PartialState::set_device() {
  const auto& facts = this->facts("device");
  auto* backend = detail::accelerator_backend();
  if (backend != nullptr && facts.device.type() == backend->type() && facts.device.has_index()) {
    backend->set_device(facts.device.index());
  }
}

void PartialState::destroy_process_group(const Lent<c10d::ProcessGroup>& group) {
  if (fork_launched() && !group) return;
  if (group && group.get() != detail::default_group().group) {
    detail::shut_down(group.get());
    return;
  }
  detail::DefaultGroup own;
  {
    const std::lock_guard lock(detail::slot().mutex);
    own = std::exchange(detail::default_group(), {});
    // Others may still be leaving, or be in the next world already, through the store that we
    // serve.
    if (own.store) detail::slot().retired_stores.push_back(own.store);
  }
  if (own.group && !own.lent) detail::shut_down(own.group);
}

detail::SplitShare PartialState::share(SplitOptions options) const {
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

namespace detail {

OrderedSection::OrderedSection(const PartialState& state, std::source_location where)
    : state_(state), where_(where) {
  (void)state.num_processes();  // throws while there is no state
  key_ = str("section/", current_facts()->sections++);
}

void OrderedSection::wait_for_the_first() {
  state_.wait_for_everyone(where_);
  const auto& store = state_.store();
  if (!state_.use_distributed() || !store || !store->check({key_})) return;
  const auto bytes = store->get(key_);
  const std::string text(bytes.begin(), bytes.end());  // "<rank> <message>"
  const auto blank = text.find(' ');
  const int rank = std::stoi(text.substr(0, blank));
  throw CommError(str("rank ", rank, ", which goes first at ", where_.file_name(), ":",
                      where_.line(), ", failed there: ", text.substr(blank + 1)),
                  rank);
}

void OrderedSection::release_the_others() { state_.wait_for_everyone(where_); }

void OrderedSection::fail(const std::string& message) noexcept {
  if (!state_.use_distributed()) return;
  try {
    // Said before the barrier, so that all have it when they come out.
    if (const auto& store = state_.store()) {
      const std::string text = str(state_.process_index(), " ", message);
      store->set(key_, std::vector<std::uint8_t>(text.begin(), text.end()));
    }
    state_.wait_for_everyone(where_);
  } catch (const std::exception& error) {
    // The caller's own exception is the one to report.
    warn(str("the other processes could not be told about a failure: ", error.what()));
  }
}

void print_line(std::string line) {
  line.push_back('\n');
  std::cout << line << std::flush;
}

}  // namespace detail
}  // namespace accelerate
