#include "checkpoint/offload.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <unordered_set>

#include "accelerate/checkpoint.h"
#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "core/files.h"
#include "core/folders.h"
#include "core/output_file.h"
#include "core/text.h"
#include "formats/mapped_file.h"
#include "formats/offload_index.h"
#include "formats/shard_index.h"
#include "modeling/torch_dtype.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using detail::formats::MappedFile;

fs::path file_of(const fs::path& folder, std::string_view name) {
  if (const auto problem = detail::formats::problem_with_weight_name(name); !problem.empty()) {
    throw ArgumentError(detail::str("The tensor '", name, "' cannot have a file of its own in '",
                                    folder.string(), "': its name ", problem, "."));
  }
  return folder / detail::str(name, ".dat");
}

at::ScalarType dtype_of(const OffloadedWeight& weight, const fs::path& file) {
  if (const auto dtype = detail::modeling::dtype_of(weight.dtype)) return *dtype;
  throw FormatError(detail::str("The index says that '", file.string(), "' has elements of dtype '",
                                weight.dtype, "', which this LibTorch does not have."),
                    file);
}

/// How long the file of a tensor must be.
std::int64_t bytes_of(const OffloadedWeight& weight, at::ScalarType dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const auto size : weight.shape) bytes *= size;  // 2^60 elements at most
  return bytes;
}

void refuse_length(const fs::path& file, std::int64_t length, std::int64_t expected) {
  throw FormatError(
      detail::str("'", file.string(), "' has ", length, " bytes, but its index says ", expected,
                  ": it was cut or belongs to another model. Remove the folder and "
                  "offload the weights again."),
      file);
}

OffloadIndex index_in(const fs::path& folder) {
  return fs::exists(folder / "index.json") ? read_offload_index(folder) : OffloadIndex();
}

void publish_index(const OffloadIndex& index, const fs::path& folder) {
  detail::OutputFile file(folder / "index.json");
  file.write(detail::formats::write_offload_index(index));
  file.publish();
}

/// `save_offload_index` for one who has the lock.
void merge_index(const OffloadIndex& index, const fs::path& folder) {
  if (index.empty()) return;
  auto all = index_in(folder);
  for (const auto& [name, weight] : index) all.set(name, weight);
  detail::flush_path(folder);  // the names of the tensors first
  publish_index(all, folder);
}

constexpr std::string_view kPurpose = "offloaded weights";

detail::Descriptor lock(const fs::path& folder) { return detail::lock_folder(folder, kPurpose); }

/// `offload_weight`; `before_publish` is called when the file is complete under another name.
void write_weight(const at::Tensor& weight, std::string_view weight_name, const fs::path& folder,
                  OffloadIndex* index, const std::function<void()>& before_publish) {
  if (weight.is_meta()) {
    throw StateError(detail::str("offload_weight: '", weight_name,
                                 "' is on the meta device and has no elements to write."));
  }
  const auto data = weight.detach().resolve_conj().resolve_neg().cpu().contiguous();
  detail::OutputFile file(file_of(folder, weight_name));
  const auto bytes = static_cast<std::size_t>(data.nbytes());
  file.reserve(static_cast<std::int64_t>(bytes));
  file.write_at(0, std::span(static_cast<const std::byte*>(data.const_data_ptr()), bytes));
  file.finish();
  before_publish();
  file.publish_unflushed();  // the names are flushed with the index
  if (index == nullptr) return;
  index->set(std::string(weight_name),
             {.dtype = detail::modeling::name_of(data.scalar_type()), .shape = data.sizes().vec()});
}

bool has_bytes_of(const at::Tensor& stored, const at::Tensor& weight) {
  const auto ours = weight.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const auto theirs = stored.contiguous();
  return ours.scalar_type() == theirs.scalar_type() && ours.sizes() == theirs.sizes() &&
         (ours.nbytes() == 0 ||
          std::memcmp(ours.const_data_ptr(), theirs.const_data_ptr(), ours.nbytes()) == 0);
}

bool is_inside(std::string_view name, std::string_view module) {
  return name == module || (name.starts_with(module) && name[module.size()] == '.');
}

}  // namespace

WeightsMap::~WeightsMap() = default;

void offload_weight(const at::Tensor& weight, std::string_view weight_name,
                    const fs::path& offload_folder, OffloadIndex* index) {
  write_weight(weight, weight_name, offload_folder, index, [] {});
}

OffloadIndex offload_weight(const at::Tensor& weight, std::string_view weight_name,
                            const fs::path& offload_folder, OffloadIndex index) {
  offload_weight(weight, weight_name, offload_folder, &index);
  return index;
}

at::Tensor load_offloaded_weight(const fs::path& weight_file, const OffloadedWeight& weight_info) {
  const auto dtype = dtype_of(weight_info, weight_file);
  const auto file = MappedFile::open_pages(weight_file);
  const auto bytes = bytes_of(weight_info, dtype);
  if (file->size() != bytes) refuse_length(weight_file, file->size(), bytes);
  if (bytes == 0) return at::empty(weight_info.shape, dtype);
  return at::from_blob(file->bytes().data(), weight_info.shape, [file](void*) {}, dtype);
}

void save_offload_index(const OffloadIndex& index, const fs::path& offload_folder) {
  if (index.empty()) return;
  const auto locked = lock(offload_folder);
  merge_index(index, offload_folder);
}

OffloadIndex read_offload_index(const fs::path& offload_folder) {
  const auto path = offload_folder / "index.json";
  if (!fs::exists(path)) {
    throw CheckpointError(
        detail::str("'", offload_folder.string(), "' is no offload folder: it has no index.json."),
        path);
  }
  return detail::formats::parse_offload_index(
      detail::read_whole_file(path, detail::formats::kMaxIndexBytes), path.string());
}

void offload_state_dict(const fs::path& save_dir, const StateDict& state_dict) {
  detail::checkpoint::OffloadWriter writer(save_dir, state_dict.keys());
  for (const auto& entry : state_dict) writer.add(entry.value(), entry.key());
  writer.finish();
}

void load_offloaded_weights(torch::nn::Module& model, const OffloadIndex& index,
                            const fs::path& offload_folder) {
  const OffloadedWeightsLoader weights({.save_folder = offload_folder, .index = index});
  for (const auto& name : weights.keys()) {
    if (name == "SCB" || name.ends_with(".SCB")) continue;
    set_module_tensor_to_device(model, name, c10::kCPU, {.value = weights.at(name)});
  }
}

OffloadedWeightsLoader::OffloadedWeightsLoader(OffloadedWeightsOptions options)
    : options_(std::move(options)) {
  if (!options_.state_dict && !options_.save_folder && !options_.index) {
    throw ArgumentError(
        "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights.");
  }
  if (!options_.index) {
    options_.index =
        options_.save_folder ? read_offload_index(*options_.save_folder) : OffloadIndex();
  }
  if (options_.state_dict) keys_ = options_.state_dict->keys();
  for (const auto& [name, weight] : *options_.index) {
    if (!options_.state_dict || !options_.state_dict->contains(name)) keys_.push_back(name);
  }
}

at::Tensor OffloadedWeightsLoader::at(const std::string& name) const {
  if (options_.state_dict) {
    if (const auto* tensor = options_.state_dict->find(name)) return *tensor;
  }
  const auto* const weight = options_.index->find(name);
  if (weight == nullptr) {
    throw ArgumentError(detail::str("There is no offloaded weight '", name, "'.",
                                    detail::did_you_mean(name, keys_)));
  }
  if (weight->safetensors_file) {
    const auto file = safetensors::File::open(*weight->safetensors_file);
    const auto tensor = file.get(weight->weight_name.value_or(name), options_.device);
    return weight->dtype.empty() ? tensor : tensor.to(dtype_of(*weight, *weight->safetensors_file));
  }
  if (!options_.save_folder) {
    throw ArgumentError(detail::str("The weight '", name,
                                    "' is in a .dat file. Pass the `save_folder` that has it."));
  }
  return load_offloaded_weight(file_of(*options_.save_folder, name), *weight);
}

PrefixedDataset::PrefixedDataset(std::shared_ptr<const WeightsMap> dataset, std::string prefix)
    : dataset_(std::move(dataset)), prefix_(std::move(prefix)) {
  for (const auto& name : dataset_->keys()) {
    if (name.starts_with(prefix_)) keys_.push_back(name.substr(prefix_.size()));
  }
}

at::Tensor PrefixedDataset::at(const std::string& name) const {
  return dataset_->at(prefix_ + name);
}

StateDict extract_submodules_state_dict(const StateDict& state_dict,
                                        const std::vector<std::string>& submodule_names) {
  StateDict extracted("Tensor");
  for (const auto& module : submodule_names) {
    for (const auto& entry : state_dict) {
      if (is_inside(entry.key(), module) && !extracted.contains(entry.key())) {
        extracted.insert(entry.key(), entry.value());
      }
    }
  }
  return extracted;
}

namespace detail::checkpoint {

OffloadWriter::OffloadWriter(const fs::path& folder, const std::vector<std::string>& names)
    : folder_(folder), names_(names.begin(), names.end()) {
  make_folders(folder);
  lock_ = lock(folder);
}

OffloadWriter::OffloadWriter(const fs::path& folder, const std::vector<std::string>& names,
                             Descriptor lock)
    : folder_(folder), names_(names.begin(), names.end()), lock_(std::move(lock)) {}

void OffloadWriter::add(const at::Tensor& weight, const std::string& name) {
  write_weight(weight, name, folder_, &index_, [&] { withdraw(name); });
}

void OffloadWriter::withdraw(const std::string& name) {
  if (!published_) published_ = index_in(folder_);
  if (!published_->contains(name)) return;
  OffloadIndex others;
  for (const auto& [known, weight] : *published_) {
    if (known != name && !names_.contains(known)) others.set(known, weight);
  }
  published_ = std::move(others);
  if (published_->empty()) {
    remove_path(folder_ / "index.json");
    flush_path(folder_);
  } else {
    publish_index(*published_, folder_);
  }
}

void OffloadWriter::finish() { merge_index(index_, folder_); }

void check_offloaded(const StateDict& state, const OffloadIndex& index, const fs::path& folder) {
  const auto refuse = [&](const std::string& name, const std::string& problem) {
    throw CheckpointError(
        str("The offload folder '", folder.string(), "' does not belong to this model: '", name,
            "' ", problem, ". Remove the folder, or offload to another one."),
        folder);
  };
  for (const auto& entry : state) {
    const auto& name = entry.key();
    const auto& tensor = entry.value();
    const auto* const weight = index.find(name);
    if (weight == nullptr) refuse(name, "is not in its index");
    if (weight->safetensors_file) continue;
    if (weight->shape != tensor.sizes().vec()) {
      refuse(name, str("has shape [", join(weight->shape), "] there and [", join(tensor.sizes()),
                       "] here"));
    }
    if (const auto dtype = modeling::name_of(tensor.scalar_type()); weight->dtype != dtype) {
      refuse(name, str("is of the dtype ", weight->dtype, " there and ", dtype, " here"));
    }
    const auto file = file_of(folder, name);
    const auto bytes = bytes_of(*weight, dtype_of(*weight, file));
    std::error_code error;
    const auto length = fs::file_size(file, error);
    if (error) refuse(name, str("has no file there: ", error.message()));
    if (static_cast<std::int64_t>(length) != bytes) {
      refuse_length(file, static_cast<std::int64_t>(length), bytes);
    }
  }
}

std::vector<std::string> differing(const StateDict& state, const OffloadIndex& index,
                                   const fs::path& folder) {
  const OffloadedWeightsLoader weights({.save_folder = folder, .index = index});
  std::vector<std::string> others;
  for (const auto& entry : state) {
    if (!has_bytes_of(weights.at(entry.key()), entry.value())) others.push_back(entry.key());
  }
  return others;
}

Descriptor hold_folder(const fs::path& folder, LockKind kind,
                       const std::function<StateDict()>& lacking) {
  make_folders(folder);
  // Another process may be writing what is lacking; its end is waited for by `lock_folder`.
  for (int attempt = 0; attempt < 3; ++attempt) {
    auto held = lock_folder(folder, kPurpose, kind);
    const auto tensors = lacking();
    if (tensors.is_empty()) return held;
    if (kind == LockKind::kExclusive || change_lock(held, LockKind::kExclusive)) {
      OffloadWriter writer(folder, tensors.keys(), std::move(held));
      for (const auto& entry : tensors) writer.add(entry.value(), entry.key());
      writer.finish();
      held = writer.release_lock();
      if (change_lock(held, kind)) return held;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  refuse_lock(folder, kPurpose);
}

}  // namespace detail::checkpoint
}  // namespace accelerate
