#include "modeling/stand_in.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "modeling/lazy_key.h"
#include "modeling/torch_dtype.h"

namespace accelerate::detail::modeling {
namespace {

/// The weak reference to the storage keeps the address from being used again.
struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::weak_ptr<StandIn> stand_in;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Entry> entries;
};

// Never destroyed: tensors of static duration may still be used when the program ends.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

}  // namespace

StandIn::~StandIn() = default;

void set_stand_in(const at::Tensor& parameter, const std::shared_ptr<StandIn>& stand_in) {
  auto* const storage = parameter.storage().unsafeGetStorageImpl();
  auto owned = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  const std::unique_lock lock(registry().mutex);
  auto& entries = registry().entries;
  std::erase_if(entries, [](const auto& entry) { return entry.second.storage.expired(); });
  entries.insert_or_assign(storage, Entry{c10::weak_intrusive_ptr(std::move(owned)), stand_in});
}

std::shared_ptr<StandIn> find_stand_in(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_marked(tensor) || !tensor.has_storage()) return nullptr;
  const std::shared_lock lock(registry().mutex);
  const auto& entries = registry().entries;
  const auto found = entries.find(tensor.storage().unsafeGetStorageImpl());
  return found == entries.end() ? nullptr : found->second.stand_in.lock();
}

std::vector<NamedStandIn> stand_ins(const torch::nn::Module& module) {
  std::vector<NamedStandIn> found;
  for (const auto& entry : module.named_parameters()) {
    if (auto stand_in = find_stand_in(entry.value())) {
      found.push_back({entry.key(), entry.value(), std::move(stand_in)});
    }
  }
  return found;
}

const NamedStandIn* owner_of(std::string_view key, const std::vector<NamedStandIn>& stand_ins) {
  const auto owner = std::ranges::find_if(
      stand_ins, [&](const NamedStandIn& one) { return one.stand_in->owns(key, one.name); });
  return owner == stand_ins.end() ? nullptr : &*owner;
}

StateDict part_of(const std::string& name, const StandIn& stand_in, const StateDict& state) {
  StateDict part("Tensor");
  for (const auto& entry : state) {
    if (stand_in.owns(entry.key(), name)) part.insert(entry.key(), entry.value().clone());
  }
  return part;
}

void refuse_codes(const std::string& name, c10::ScalarType own,
                  const std::function<bool(const std::string&)>& contains,
                  const std::function<c10::ScalarType()>& theirs) {
  if (!c10::isFloatingType(own)) return;
  const auto text = name + ".quant_state.bitsandbytes__";
  const bool is_4bit = contains(text + "nf4") || contains(text + "fp4");
  const auto dot = name.rfind('.');
  const auto scales = name.substr(0, dot == name.npos ? 0 : dot + 1) + "SCB";
  if (!is_4bit && !(contains(scales) && theirs() == c10::ScalarType::Char)) return;
  throw FormatError(str("'", name, "' is quantized to ", is_4bit ? 4 : 8,
                        " bits in the file, and the model keeps it in ", name_of(own),
                        ": its codes are no values. Load it by load_and_quantize_model with the "
                        "skip_modules and keep_in_fp32_modules that it was saved with, or load "
                        "weights that are not quantized."),
                    name);
}

}  // namespace accelerate::detail::modeling
