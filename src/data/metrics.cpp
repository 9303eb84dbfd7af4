#include <ATen/Functions.h>

#include "accelerate/errors.h"
#include "accelerate/gather_for_metrics.h"
#include "accelerate/gradient_state.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate::detail {

std::optional<MetricsCut> metrics_cut() {
  if (is_alone(nullptr)) return std::nullopt;
  const auto loader = GradientState().active_dataloader();
  if (!loader || !loader->end_of_dataloader()) return std::nullopt;
  const MetricsCut cut{.genuine = loader->remainder(), .padded = loader->padded_size()};
  if (cut.genuine == -1) {
    info(
        "The used dataset had no length, returning gathered tensors. You should drop the remainder "
        "yourself.");
  }
  const bool cuts = cut.genuine > 0 && cut.genuine != cut.padded;
  return cuts ? std::optional(cut) : std::nullopt;
}

std::int64_t kept_of(std::int64_t length, const MetricsCut& cut) {
  if (length == cut.padded) return cut.genuine;
  warn_once(str("gather_for_metrics returns ", length, " gathered rows whole: the processes hold ",
                cut.padded, " samples, of which ", cut.genuine,
                " are no repeats, so that there is not one row per sample."));
  return length;
}

at::Tensor kept_of(const at::Tensor& gathered, const MetricsCut& cut) {
  return gathered.narrow(0, 0, kept_of(gathered.size(0), cut));
}

bool holds_tensors_alone(const Value& value) {
  try {
    refuse_others<at::Tensor>("gather_for_metrics", value);
    return true;
  } catch (const ArgumentError&) {
    return false;
  }
}

at::Tensor gather_rows_as_objects(const at::Tensor& tensor, std::source_location where) {
  if (is_alone(nullptr)) return tensor;
  auto parts = accelerate::gather_object(
      std::vector{tensor.dim() == 0 ? tensor.reshape({1}) : tensor}, where);
  for (auto& part : parts) part = part.to(tensor.device());
  auto rows = at::cat(parts);
  const auto cut = metrics_cut();
  return cut ? kept_of(rows, *cut) : rows;
}

void refuse_as_objects() {
  throw ArgumentError(
      "gather_for_metrics gathers objects as one list: pass a std::vector, a tensor or a list "
      "value, or leave use_gather_object off.");
}

}  // namespace accelerate::detail
