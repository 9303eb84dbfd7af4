#include <ATen/Functions.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "accelerate/data/gather_for_metrics.h"
#include "accelerate/detail/data/loader_core.h"
#include "accelerate/errors.h"
#include "accelerate/operations/collectives.h"
#include "accelerate/state/gradient_state.h"
#include "accelerate/state/partial_state.h"
#include "core/log.h"
#include "core/text.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

std::int64_t rows_of(const std::vector<at::Tensor>& parts) {
  std::int64_t rows = 0;
  for (const auto& part : parts) rows += part.size(0);
  return rows;
}

/// How many samples of the last batch are genuine, how many there are with its repeats, and who has
/// which of them.
struct MetricsCut {
  std::int64_t genuine = 0;
  std::int64_t padded = 0;
  std::int64_t processes = 1;  // of the run
  DataPlace place = {};
};

/// Returns nullopt if no row is dropped; logs if the number of genuine samples is not known.
std::optional<MetricsCut> metrics_cut() {
  if (comm::is_alone(nullptr)) return std::nullopt;
  const auto loader = GradientState().active_dataloader();
  if (!loader || !loader->end_of_dataloader()) return std::nullopt;
  MetricsCut cut{.genuine = loader->remainder(),
                 .padded = loader->padded_size(),
                 .processes = PartialState().num_processes()};
  const auto* const ours = dynamic_cast<const LoaderCore*>(loader.get());
  if (ours != nullptr) cut.place = ours->data_place();
  if (cut.genuine == -1) {
    info(
        "The used dataset had no length, returning gathered tensors. You should drop the remainder "
        "yourself.");
  }
  const bool cuts = cut.genuine > 0 && cut.genuine != cut.padded;
  return cuts ? std::optional(cut) : std::nullopt;
}

/// The parts of the batch of the loader that is iterated; null where nothing is uneven.
std::shared_ptr<const UnevenParts> uneven_parts() {
  if (comm::is_alone(nullptr)) return nullptr;
  const auto loader = GradientState().active_dataloader();
  const auto* ours = dynamic_cast<const LoaderCore*>(loader.get());
  return ours == nullptr ? nullptr : ours->uneven_parts();
}

/// Whether `length` gathered items are one per sample. Warns once where not.
bool one_per_sample(std::int64_t length, const UnevenParts& parts) {
  const auto samples = std::accumulate(parts.lengths.begin(), parts.lengths.end(), std::int64_t{0});
  if (length == samples) return true;
  warn_once(str("gather_for_metrics returns ", length, " gathered rows whole: the processes hold ",
                samples, " samples, so that there is not one row per sample."));
  return false;
}

/// One row per sample, without repeats, from parts that were padded to one length.
at::Tensor genuine_rows(const at::Tensor& gathered, const UnevenParts& parts) {
  const auto longest = std::ranges::max(parts.lengths);
  std::vector<at::Tensor> kept;
  for (std::size_t rank = 0; rank < parts.genuine.size(); ++rank) {
    kept.push_back(
        gathered.narrow(0, static_cast<std::int64_t>(rank) * longest, parts.genuine[rank]));
  }
  return at::cat(kept);
}

/// Collective. Gathers tensors with a row per sample, whatever their lengths, without repeats;
/// others as they are.
void gather_uneven(std::vector<at::Tensor>& leaves, const comm::TreeView& view,
                   const UnevenParts& parts, std::source_location where) {
  if (leaves.empty()) return;
  std::vector<std::int64_t> mine;
  for (const auto& leaf : leaves) mine.push_back(leaf.dim() == 0 ? -1 : leaf.size(0));
  // Every process must come to the same decision about a leaf.
  const auto rows = gather_numbers(mine, where);
  const auto lengths = at::tensor(parts.lengths, at::kLong);
  const auto longest = std::ranges::max(parts.lengths);
  std::vector<bool> per_sample;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    auto& leaf = leaves[i];
    per_sample.push_back(rows.select(1, static_cast<std::int64_t>(i)).equal(lengths));
    if (!per_sample[i] || leaf.size(0) == longest) continue;
    auto padding = leaf.sizes().vec();
    padding[0] = longest - leaf.size(0);
    leaf = at::cat({leaf, leaf.new_zeros(padding)});
  }
  comm::LeafCollectives::gather(leaves, view, {nullptr, where});
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (per_sample[i]) {
      leaves[i] = genuine_rows(leaves[i], parts);
    } else if (mine[i] != -1) {
      std::ignore = one_per_sample(leaves[i].size(0), parts);
    }
  }
}

/// Which of `length` gathered items to keep: all, with a warning, unless there is one for each
/// sample of each process.
std::vector<ItemRange> kept_of(std::int64_t length, const MetricsCut& cut) {
  const auto processes = cut.place.processes, together = cut.place.together;
  const auto copies = together > 0 ? cut.processes / processes : 1;
  if (length != cut.padded * copies || cut.padded % processes != 0) {
    warn_once(str("gather_for_metrics returns ", length,
                  " gathered rows whole: the processes hold ", cut.padded * copies,
                  " samples, of which ", cut.genuine * copies,
                  " are no repeats, so that there is not one row per sample."));
    return {{0, length}};
  }
  if (copies == 1) return {{0, cut.genuine}};
  const auto each = cut.padded / processes;
  std::vector<ItemRange> kept;
  for (std::int64_t rank = 0; rank < cut.processes; ++rank) {
    const auto before = rank / together % processes * each;
    const auto genuine = std::clamp<std::int64_t>(cut.genuine - before, 0, each);
    kept.push_back({rank * each, rank * each + genuine});
  }
  return kept;
}

at::Tensor kept_of(const at::Tensor& gathered, const MetricsCut& cut) {
  std::vector<at::Tensor> kept;
  for (const auto& [begin, end] : kept_of(gathered.size(0), cut)) {
    kept.push_back(gathered.slice(0, begin, end));
  }
  return kept.size() == 1 ? kept.front() : at::cat(kept);
}

}  // namespace

std::optional<std::vector<ItemRange>> MetricsGather::genuine_items(std::int64_t length) {
  if (const auto parts = uneven_parts()) {
    if (!one_per_sample(length, *parts)) return std::nullopt;
    std::vector<ItemRange> ranges;
    std::int64_t begin = 0;
    for (std::size_t rank = 0; rank < parts->lengths.size(); ++rank) {
      ranges.push_back({begin, begin + parts->genuine[rank]});
      begin += parts->lengths[rank];
    }
    return ranges;
  }
  const auto cut = metrics_cut();
  if (!cut) return std::nullopt;
  return kept_of(length, *cut);
}

void MetricsGather::leaves(std::vector<at::Tensor>& leaves, const comm::TreeView& view,
                           std::source_location where) {
  if (const auto parts = uneven_parts()) return gather_uneven(leaves, view, *parts, where);
  std::vector<bool> has_rows;  // a value without dimensions belongs to the batch, not to a sample
  for (const auto& leaf : leaves) has_rows.push_back(leaf.dim() > 0);
  comm::LeafCollectives::gather(leaves, view, {nullptr, where});
  const auto cut = metrics_cut();
  if (!cut) return;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (has_rows[i]) leaves[i] = kept_of(leaves[i], *cut);
  }
}

bool MetricsGather::holds_tensors_alone(const Value& value) {
  try {
    comm::refuse_others<at::Tensor>("gather_for_metrics", value);
    return true;
  } catch (const ArgumentError&) {
    return false;
  }
}

at::Tensor MetricsGather::rows_as_objects(const at::Tensor& tensor, std::source_location where) {
  if (comm::is_alone(nullptr)) return tensor;
  const bool has_rows = tensor.dim() > 0;
  auto parts =
      accelerate::gather_object(std::vector{has_rows ? tensor : tensor.reshape({1})}, where);
  for (auto& part : parts) part = part.to(tensor.device());
  if (!has_rows) return at::cat(parts);
  const auto uneven = uneven_parts();
  if (uneven && one_per_sample(rows_of(parts), *uneven)) {
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      parts[rank] = parts[rank].narrow(0, 0, std::min(uneven->genuine[rank], parts[rank].size(0)));
    }
  }
  auto rows = at::cat(parts);
  if (uneven) return rows;
  const auto cut = metrics_cut();
  return cut ? kept_of(rows, *cut) : rows;
}

}  // namespace accelerate::detail::data
