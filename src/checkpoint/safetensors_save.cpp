#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <tuple>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/safetensors.h"
#include "checkpoint/parallel_chunks.h"
#include "checkpoint/safetensors_dtypes.h"
#include "checkpoint/write_file.h"
#include "core/output_file.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/safetensors_header.h"

namespace accelerate::safetensors {
namespace {

using detail::python_repr;
using detail::str;
using detail::checkpoint::FilePiece;

std::string names_text(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const auto& name : names) quoted.push_back(python_repr(std::string_view(name)));
  return detail::join(quoted);
}

void refuse_sparse(const StateDict& tensors) {
  std::vector<std::string> sparse;
  for (const auto& item : tensors) {
    if (!item.value().defined()) {
      throw ArgumentError(
          str("The tensor ", python_repr(std::string_view(item.key())), " is undefined."));
    }
    if (item.value().layout() != at::kStrided) sparse.push_back(item.key());
  }
  if (sparse.empty()) return;
  throw ArgumentError(str("You are trying to save a sparse tensors: `[", names_text(sparse),
                          "]` which this library does not support. You can make it a dense tensor "
                          "before saving with `.to_dense()` but be aware this might make a much "
                          "larger file than needed."));
}

// The addresses that a tensor occupies.
struct Area {
  c10::Device device;
  std::uintptr_t begin;
  std::uintptr_t end;
  std::string name;
};

Area area_of(const std::string& name, const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return {tensor.device(), begin, begin + static_cast<std::uintptr_t>(last + 1) * tensor.itemsize(),
          name};
}

void refuse_shared(const StateDict& tensors) {
  std::vector<Area> areas;
  for (const auto& item : tensors) {
    if (item.value().is_meta() || item.value().numel() == 0) continue;
    areas.push_back(area_of(item.key(), item.value()));
  }
  std::ranges::sort(areas, [](const Area& a, const Area& b) {
    return std::tuple(a.device.type(), a.device.index(), a.begin, a.name) <
           std::tuple(b.device.type(), b.device.index(), b.begin, b.name);
  });
  std::vector<std::string> groups;
  for (std::size_t i = 0; i < areas.size();) {
    std::vector<std::string> names{areas[i].name};
    auto end = areas[i].end;
    const auto device = areas[i].device;
    for (++i; i < areas.size() && areas[i].device == device && areas[i].begin < end; ++i) {
      end = std::max(end, areas[i].end);
      names.push_back(areas[i].name);
    }
    std::ranges::sort(names);
    if (names.size() > 1) groups.push_back("{" + names_text(names) + "}");
  }
  if (groups.empty()) return;
  throw ArgumentError(
      str("Some tensors share memory, this will lead to duplicate memory on disk "
          "and potential differences when loading them again: [",
          detail::join(groups),
          "]. A potential way to correctly save your model is to use `save_model`."));
}

void refuse_unwritable(const StateDict& tensors) {
  refuse_sparse(tensors);
  refuse_shared(tensors);
  for (const auto& item : tensors) {
    if (item.value().is_meta()) {
      throw ArgumentError(str("The tensor ", python_repr(std::string_view(item.key())),
                              " is on the meta device: it has no data to save."));
    }
    if (!item.value().is_contiguous()) {
      throw ArgumentError(
          str("You are trying to save a non contiguous tensor: `", item.key(),
              "` which is not allowed. It either means you are trying to save tensors which are "
              "reference of each other in which case it's recommended to save only the full "
              "tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to "
              "pack it before saving."));
    }
  }
}

// The header of the file and, in the order of its entries, the tensors.
struct Plan {
  detail::formats::SafetensorsHeader header;
  std::string header_bytes;
  std::vector<at::Tensor> tensors;

  [[nodiscard]] std::int64_t offset_of(std::size_t i) const {
    return static_cast<std::int64_t>(header_bytes.size()) + header.tensors[i].begin;
  }
  [[nodiscard]] std::int64_t file_bytes() const {
    return static_cast<std::int64_t>(header_bytes.size()) +
           (header.tensors.empty() ? 0 : header.tensors.back().end);
  }
};

Plan plan_file(const StateDict& tensors, const Metadata& metadata) {
  refuse_unwritable(tensors);
  std::vector<detail::formats::TensorEntry> entries;
  entries.reserve(tensors.size());
  for (const auto& item : tensors) {
    entries.push_back(detail::checkpoint::entry_of(item.key(), item.value()));
  }
  Plan plan;
  plan.header = detail::formats::plan_safetensors(std::move(entries), metadata);
  plan.header_bytes = detail::formats::safetensors_header_bytes(plan.header);
  for (const auto& entry : plan.header.tensors) {
    // A conjugated or negated view is a flag of the tensor, which its bytes do not have.
    plan.tensors.push_back(tensors[entry.name].detach().resolve_conj().resolve_neg());
  }
  return plan;
}

// Calls `transfer` for the bytes of all tensors: those on the CPU in parallel, others one by one,
// so that no more than one copy of them is in memory.
void write_tensors(const Plan& plan, const std::function<void(const FilePiece&)>& transfer) {
  const auto piece_of = [&](std::size_t i, const at::Tensor& tensor) -> FilePiece {
    return {plan.offset_of(i), {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()}};
  };
  std::vector<FilePiece> pieces;
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    const auto& tensor = plan.tensors[i];
    if (tensor.is_cpu()) {
      pieces.push_back(piece_of(i, tensor));
    } else {
      const auto copy = tensor.cpu();
      const auto piece = piece_of(i, copy);
      detail::checkpoint::transfer_in_parallel({&piece, 1}, transfer);
    }
  }
  detail::checkpoint::transfer_in_parallel(pieces, transfer);
}

}  // namespace

void save_file(const StateDict& tensors, const std::filesystem::path& path,
               const Metadata& metadata) {
  detail::OutputFile file(path);
  detail::ByteBar bar("saving", detail::checkpoint::bytes_in_safetensors(tensors));
  detail::checkpoint::write_safetensors(tensors, metadata, file, bar);
  file.publish();
}

std::string serialize(const StateDict& tensors, const Metadata& metadata) {
  const Plan plan = plan_file(tensors, metadata);
  std::string bytes = plan.header_bytes;
  bytes.resize(static_cast<std::size_t>(plan.file_bytes()));
  write_tensors(plan, [&](const FilePiece& piece) {
    std::memcpy(bytes.data() + piece.offset, piece.memory.data(), piece.memory.size());
  });
  return bytes;
}

}  // namespace accelerate::safetensors

namespace accelerate::detail::checkpoint {

std::int64_t bytes_in_safetensors(const StateDict& tensors) {
  std::int64_t bytes = 0;
  for (const auto& entry : tensors) bytes += static_cast<std::int64_t>(entry.value().nbytes());
  return bytes;
}

void write_safetensors(const StateDict& tensors, const safetensors::Metadata& metadata,
                       OutputFile& file, ByteBar& bar) {
  const auto plan = safetensors::plan_file(tensors, metadata);
  file.reserve(plan.file_bytes());
  file.write(plan.header_bytes);
  safetensors::write_tensors(plan, [&](const FilePiece& piece) {
    file.write_at(piece.offset, piece.memory);
    bar.add(std::ssize(piece.memory));
  });
}

}  // namespace accelerate::detail::checkpoint
