#include "lazy/trigger.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "lazy/operator_arguments.h"
#include "lazy/operator_rule.h"
#include "lazy/released_storage.h"

namespace accelerate::detail::lazy {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;

// -- which storages are managed, and which parameters have a rule ---------------------------------

/// For the bytes from `begin` up to `end` of a storage: several parameters may lie in one.
struct RuleEntry {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::shared_ptr<OperatorRule> rule;
  /// No other storage gets the address while the entry exists.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<ManagedStorage>> storages;
  std::unordered_map<const c10::StorageImpl*, std::vector<RuleEntry>> rules;
};

// Never destroyed: tensors of static duration may still be used when the program ends.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

std::size_t first_byte(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
}

// -- what the schema of an operator says ----------------------------------------------------------

constexpr std::size_t kMostArguments = 64;

enum class Factory : std::uint8_t { kNone, kUndefinedValues, kDefinedValues };

struct OperatorFacts {
  bool only_makes_a_view = false;
  std::bitset<kMostArguments> writes;
  /// Written without the schema saying so, if the argument `training` is true.
  std::bitset<kMostArguments> statistics;
  /// Read by the host: the steps of a packed sequence.
  std::bitset<kMostArguments> on_host;
  std::optional<std::size_t> training = std::nullopt;
  Factory factory = Factory::kNone;
  std::size_t device_argument = 0;
};

Factory factory_kind(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  name.remove_prefix(std::min(name.size(), name.find("::") + 2));
  if (name.starts_with("empty") || name.starts_with("rand") || name.starts_with("normal")) {
    return Factory::kUndefinedValues;
  }
  constexpr std::array<std::string_view, 9> kDefined{
      "zeros", "ones", "full", "arange", "range", "eye", "linspace", "logspace", "scalar_tensor"};
  return std::ranges::find(kDefined, name) != kDefined.end() ? Factory::kDefinedValues
                                                             : Factory::kNone;
}

OperatorFacts read_schema(const c10::FunctionSchema& schema) {
  OperatorFacts facts;
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias != nullptr && !alias->isWrite()) facts.only_makes_a_view = true;
  }
  bool takes_tensors = false;
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    // An operator with more arguments than that is taken to write all of them.
    if (alias != nullptr && alias->isWrite()) facts.writes.set(std::min(i, kMostArguments - 1));
    const auto& name = arguments[i].name();
    if (name == "running_mean" || name == "running_var") {
      facts.statistics.set(std::min(i, kMostArguments - 1));
    }
    if (name == "batch_sizes" ||
        (name == "lengths" && schema.name() == "aten::_pack_padded_sequence")) {
      facts.on_host.set(std::min(i, kMostArguments - 1));
    }
    if (name == "training" || name == "use_input_stats") facts.training = i;
    if (name == "device") facts.device_argument = i;
    takes_tensors = takes_tensors || arguments[i].type()->isSubtypeOf(*c10::TensorType::get());
  }
  if (facts.device_argument > 0 && !takes_tensors) facts.factory = factory_kind(schema);
  return facts;
}

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorFacts> known;
  const auto* schema = &op.schema();
  const auto found = known.find(schema);
  return found != known.end() ? found->second
                              : known.emplace(schema, read_schema(*schema)).first->second;
}

// -- arguments on other devices -------------------------------------------------------------------

bool must_move(const at::Tensor& tensor, c10::Device device) {
  // Operators take numbers from the host by themselves.
  return tensor.defined() && tensor.device() != device && !(tensor.is_cpu() && tensor.dim() == 0);
}

/// Moves all arguments that are not for the host to `device`, recorded for backward. Returns false
/// if they were there.
bool move_arguments(const c10::OperatorHandle& op, const OperatorFacts& facts,
                    torch::jit::Stack& stack, c10::Device device) {
  const auto count = op.schema().arguments().size();
  bool moved = false;
  const auto take = [&](const at::Tensor& tensor, bool written) {
    if (!must_move(tensor, device)) return tensor;
    if (written) {
      throw ArgumentError(str(op.schema().name(), " writes to a tensor on ", tensor.device().str(),
                              ", but the weights that it uses are on ", device.str(),
                              ". Put that tensor on ", device.str(), "."));
    }
    moved = true;
    return tensor.to(device);
  };
  for (std::size_t i = 0; i < count; ++i) {
    auto& argument = stack[stack.size() - count + i];
    if (facts.on_host.test(std::min(i, kMostArguments - 1))) continue;
    bool elsewhere = false;
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      elsewhere = elsewhere || must_move(tensor, device);
    });
    if (!elsewhere) continue;
    const bool written = facts.writes.test(std::min(i, kMostArguments - 1));
    if (argument.isTensor()) {
      argument = take(argument.toTensor(), written);
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : argument.toTensorList()) {
        list.push_back(take(tensor, written));
      }
      argument = std::move(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : argument.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional(take(*tensor, written)) : std::nullopt);
      }
      argument = std::move(list);
    }
  }
  return moved;
}

// -- the fallback of marked tensors ---------------------------------------------------------------

struct ThreadState {
  bool one_device_per_operator = false;
  std::optional<c10::Device> last_device = std::nullopt;
  FactoryDevice factory = {};
};
thread_local ThreadState thread_state;

/// What an operator uses, until it has been queued.
class Pins {
 public:
  Pins() = default;
  ~Pins() {
    for (const auto& managed : pinned_) managed->unpin();
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  void add(const at::Tensor& tensor, Access access) {
    if (!tensor.defined() || !is_marked(tensor)) return;
    auto managed = find_managed(tensor);
    if (managed == nullptr) return;
    managed->pin(access);
    pinned_.push_back(std::move(managed));
  }
  /// Of the first one; nullopt if nothing is pinned.
  [[nodiscard]] std::optional<c10::Device> device() const {
    return pinned_.empty() ? std::nullopt : std::optional(pinned_.front()->device());
  }

 private:
  c10::SmallVector<std::shared_ptr<ManagedStorage>, 4> pinned_;
};

/// Autocast would keep a copy of each weight that it casts until its outermost scope ends.
class NoAutocastCache {
 public:
  NoAutocastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    if (before_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoAutocastCache() {
    if (before_) at::autocast::set_autocast_cache_enabled(true);
  }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool before_;
};

struct RuleAndArgument {
  std::shared_ptr<OperatorRule> rule;
  std::size_t argument = 0;
};

/// The rules of the tensors among the arguments, the first one first.
c10::SmallVector<RuleAndArgument, 2> rules_of(Arguments arguments) {
  c10::SmallVector<RuleAndArgument, 2> found;
  {
    const std::shared_lock lock(registry().mutex);
    if (registry().rules.empty()) return found;
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    bool is_first = true;  // of a list, one for all
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      auto rule = is_first ? find_rule(tensor) : nullptr;
      if (rule == nullptr || (!arguments[i].isTensor() && !rule->takes_lists())) return;
      is_first = false;
      found.push_back({std::move(rule), i});
    });
  }
  return found;
}

/// Returns true if one of `rules` has computed the operator.
bool run_rules(const c10::OperatorHandle& op, torch::jit::Stack& stack,
               c10::ArrayRef<RuleAndArgument> rules, bool reads_bytes) {
  const c10::impl::ExcludeDispatchKeyGuard once(kLazyKey);
  for (const auto& [rule, argument] : rules) {
    if (rule->reads_bytes() == reads_bytes && rule->run(op, stack, argument)) return true;
  }
  return false;
}

c10::DispatchKeySet below(c10::DispatchKey key, c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
}

void on_marked(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& facts = facts_of(op);
  if (facts.only_makes_a_view) {
    op.redispatchBoxed(below(kLazyKey, keys), stack);
    return;
  }
  const auto count = op.schema().arguments().size();
  const Arguments arguments(stack->data() + stack->size() - count, count);
  auto writes = facts.writes;
  if (facts.training && arguments[*facts.training].isBool() &&
      arguments[*facts.training].toBool()) {
    writes |= facts.statistics;
  }
  const auto rules = rules_of(arguments);
  if (!rules.empty() && run_rules(op, *stack, rules, /*reads_bytes=*/false)) return;
  Pins pins;
  for (std::size_t i = 0; i < count; ++i) {
    const auto access =
        writes.test(std::min(i, kMostArguments - 1)) ? Access::kWrite : Access::kRead;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) { pins.add(tensor, access); });
  }
  const NoAutocastCache no_cache;
  if (!rules.empty() && run_rules(op, *stack, rules, /*reads_bytes=*/true)) return;
  if (const auto device = pins.device()) {
    thread_state.last_device = device;
    if (move_arguments(op, facts, *stack, *device)) {
      // The keys were those of the devices before. All that the operator uses is pinned.
      const c10::impl::ExcludeDispatchKeyGuard once(kLazyKey);
      op.callBoxed(stack);
      return;
    }
  }
  op.redispatchBoxed(below(kLazyKey, keys), stack);
}

// -- the fallback of a thread's mode --------------------------------------------------------------

void fill_in_device(const OperatorFacts& facts, std::size_t count, torch::jit::Stack& stack) {
  const auto& wanted = thread_state.factory;
  if (facts.factory == Factory::kNone) return;
  if (facts.factory == Factory::kDefinedValues && !wanted.all_factories) return;
  auto& device = stack[stack.size() - count + facts.device_argument];
  if (device.isNone()) device = *wanted.device;
}

/// Whether arguments are on several accelerators, or on one and on the CPU.
bool devices_differ(Arguments arguments, const OperatorFacts& facts) {
  std::optional<c10::Device> first;
  bool differ = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (facts.on_host.test(std::min(i, kMostArguments - 1))) continue;
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
      if (!first) first = tensor.device();
      differ = differ || tensor.device() != *first;
    });
  }
  return differ;
}

void on_mode(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& facts = facts_of(op);
  const auto count = op.schema().arguments().size();
  // What an operator itself makes with torch::empty follows its own arguments.
  std::optional<c10::impl::ExcludeDispatchKeyGuard> outermost;
  if (thread_state.factory.device) {
    fill_in_device(facts, count, *stack);
    outermost.emplace(kModeKey);
  }
  if (thread_state.one_device_per_operator && thread_state.last_device && !keys.has(kLazyKey) &&
      op.schema().name() != "aten::copy_" &&
      devices_differ(Arguments(stack->data() + stack->size() - count, count), facts)) {
    const c10::impl::ExcludeDispatchKeyGuard once(kModeKey);
    move_arguments(op, facts, *stack, *thread_state.last_device);
    op.callBoxed(stack);
    return;
  }
  op.redispatchBoxed(below(kModeKey, keys), stack);
}

/// Never taken back: see `manage_storage`.
void install(c10::DispatchKey key, torch::CppFunction fallback) {
  auto* library = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  library->fallback(std::move(fallback));
}

void install_lazy_fallback() {
  static std::once_flag once;
  std::call_once(
      once, [] { install(kLazyKey, torch::CppFunction::makeFromBoxedFunction<&on_marked>()); });
}

/// Turns the mode of this thread on or off, as its state asks for.
void update_mode() {
  static std::once_flag once;
  const bool wanted = thread_state.one_device_per_operator || thread_state.factory.device;
  if (wanted) {
    std::call_once(
        once, [] { install(kModeKey, torch::CppFunction::makeFromBoxedFunction<&on_mode>()); });
  }
  c10::impl::tls_set_dispatch_key_included(kModeKey, wanted);
}

}  // namespace

void manage_storage(const c10::StorageImpl& storage, std::shared_ptr<ManagedStorage> managed) {
  install_lazy_fallback();
  const std::unique_lock lock(registry().mutex);
  registry().storages[&storage] = std::move(managed);
}

void forget_storage(const c10::StorageImpl& storage) noexcept {
  const std::unique_lock lock(registry().mutex);
  registry().storages.erase(&storage);
}

std::shared_ptr<ManagedStorage> find_managed(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const std::shared_lock lock(registry().mutex);
  const auto& storages = registry().storages;
  const auto found = storages.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages.end() ? nullptr : found->second;
}

void set_rule(const at::Tensor& parameter, std::shared_ptr<OperatorRule> rule) {
  install_lazy_fallback();
  const auto begin = first_byte(parameter);
  const std::unique_lock lock(registry().mutex);
  auto& rules = registry().rules;
  std::erase_if(rules, [](const auto& one) { return one.second.front().storage.expired(); });
  auto* const storage = parameter.storage().unsafeGetStorageImpl();
  std::erase_if(rules[storage], [&](const RuleEntry& entry) { return entry.begin == begin; });
  if (rule != nullptr) {
    mark(*parameter.unsafeGetTensorImpl());
    auto owned = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    rules[storage].push_back(
        {begin, begin + parameter.nbytes(), std::move(rule), c10::weak_intrusive_ptr(owned)});
  } else {
    if (rules[storage].empty()) rules.erase(storage);
    if (!registry().storages.contains(storage)) unmark(*parameter.unsafeGetTensorImpl());
  }
}

std::shared_ptr<OperatorRule> find_rule(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !is_marked(tensor)) return nullptr;
  const std::shared_lock lock(registry().mutex);
  const auto& rules = registry().rules;
  const auto found = rules.find(tensor.storage().unsafeGetStorageImpl());
  if (found == rules.end()) return nullptr;
  const auto byte = first_byte(tensor);
  for (const auto& entry : found->second) {
    if (entry.begin <= byte && byte < entry.end) return entry.rule;
  }
  return nullptr;
}

OneDevicePerOperator::OneDevicePerOperator()
    : before_(std::exchange(thread_state.one_device_per_operator, true)) {
  update_mode();
}

OneDevicePerOperator::~OneDevicePerOperator() {
  thread_state.one_device_per_operator = before_;
  update_mode();
}

FactoryDevice exchange_factory_device(const FactoryDevice& wanted) {
  const auto before = std::exchange(thread_state.factory, wanted);
  update_mode();
  return before;
}

}  // namespace accelerate::detail::lazy
