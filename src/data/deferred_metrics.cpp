#include "accelerate/deferred_metrics.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "core/text.h"

namespace accelerate {
namespace {

using at::Tensor;

/// The sums of one process under one name.
struct Total {
  double sum = 0;
  double weight = 0;
  std::int64_t count = 0;
};
using NamedTotals = std::vector<std::pair<std::string, Total>>;

Value::Dict means_of(const NamedTotals& totals) {
  Value::Dict means;
  for (const auto& [name, total] : totals) {
    if (total.count == 0) continue;
    const bool weighs = total.weight > 0;
    means.set(name, weighs ? total.sum / total.weight : std::numeric_limits<double>::quiet_NaN());
  }
  return means;
}

const Total* find(const NamedTotals& totals, std::string_view name) {
  for (const auto& [known, total] : totals) {
    if (known == name) return &total;
  }
  return nullptr;
}

/// Throws `CommError` if `rank` lacks a name of `other_rank`.
void require_names(const NamedTotals& totals, std::size_t rank, const NamedTotals& others,
                   std::size_t other_rank) {
  for (const auto& [name, total] : others) {
    if (find(totals, name) != nullptr) continue;
    throw CommError(
        detail::str("DeferredMetrics::reduce: rank ", rank, " has never added to '", name,
                    "', to which rank ", other_rank,
                    " has. Add to the same names on all processes, with weight 0 if there is no "
                    "value."),
        static_cast<int>(rank));
  }
}

void check(std::string_view name, const Tensor& value, double weight) {
  if (!value.defined() || value.numel() != 1) {
    throw ArgumentError(detail::str(
        "The metric '", name, "' takes one value at a time, but ",
        value.defined() ? detail::str("the tensor has shape ", value.sizes())
                        : std::string("the tensor is undefined"),
        ". Add its mean, weighted by the number of values: add(\"", name, "\", x.mean(), n)."));
  }
  if (value.is_complex()) {
    throw ArgumentError(detail::str("The metric '", name, "' is of ", value.scalar_type(),
                                    "; only real numbers have a mean here. Add its absolute value, "
                                    "for example."));
  }
  if (!std::isfinite(weight) || weight < 0) {
    throw ArgumentError(detail::str("The weight of a value of the metric '", name, "' is ", weight,
                                    "; it must be a number, 0 or more."));
  }
}

}  // namespace

/// Sums stay on the device of their values. All sums of a device are in one tensor, so that one
/// copy reads them. Weights and counts are on the host.
class DeferredMetrics::Sums {
 public:
  void add(std::string_view name, const Tensor& value, double weight) {
    check(name, value, weight);
    const at::NoGradGuard no_grad;
    auto& metric = metric_of(name);
    const auto& sum = sum_of(metric, value.device());
    sum.add_(value.dim() == 0 ? value : value.reshape({}), weight);
    metric.weight += weight;
    ++metric.count;
  }

  [[nodiscard]] NamedTotals totals() const {
    NamedTotals result;
    result.reserve(metrics_.size());
    for (const auto& metric : metrics_) {
      result.push_back({metric.name, {.sum = 0, .weight = metric.weight, .count = metric.count}});
    }
    for (const auto& on_device : devices_) {
      const auto sums = on_device.sums.to(at::kCPU, at::kDouble);
      const auto* const numbers = sums.const_data_ptr<double>();
      for (std::size_t i = 0; i < on_device.metrics.size(); ++i) {
        result[on_device.metrics[i]].second.sum += numbers[i];
      }
    }
    return result;
  }

  /// Sets all sums to 0; names keep their places.
  void reset() {
    const at::NoGradGuard no_grad;
    for (auto& on_device : devices_) on_device.sums.zero_();
    for (auto& metric : metrics_) {
      metric.weight = 0;
      metric.count = 0;
    }
  }

 private:
  struct Metric {
    std::string name;
    double weight = 0;
    std::int64_t count = 0;
    std::vector<Tensor> sums = {};  // without dimensions, one per device; views into DeviceSums
  };
  /// The sums of one device.
  struct DeviceSums {
    Tensor sums;                            // with room for more
    std::vector<std::size_t> metrics = {};  // indices of the metrics that they belong to
  };

  Metric& metric_of(std::string_view name) {
    // Training loops add in the same order in each step: start after the last one found.
    for (std::size_t i = 0; i < metrics_.size(); ++i) {
      next_ = next_ < metrics_.size() ? next_ : 0;
      if (auto& metric = metrics_[next_++]; metric.name == name) return metric;
    }
    next_ = 0;
    return metrics_.emplace_back(Metric{.name = std::string(name)});
  }

  const Tensor& sum_of(Metric& metric, c10::Device device) {
    for (const auto& sum : metric.sums) {
      if (sum.device() == device) return sum;
    }
    auto& on_device = sums_on(device);
    const auto place = on_device.metrics.size();
    if (static_cast<std::int64_t>(place) == on_device.sums.size(0)) grow(on_device);
    on_device.metrics.push_back(static_cast<std::size_t>(&metric - metrics_.data()));
    return metric.sums.emplace_back(on_device.sums.select(0, static_cast<std::int64_t>(place)));
  }

  DeviceSums& sums_on(c10::Device device) {
    for (auto& on_device : devices_) {
      if (on_device.sums.device() == device) return on_device;
    }
    constexpr std::int64_t kRoom = 16;
    // A tensor made in inference mode could not be changed outside of it.
    const c10::InferenceMode normal_mode(false);
    const auto dtype = device.is_mps() ? at::kFloat : at::kDouble;
    return devices_.emplace_back(
        DeviceSums{.sums = at::zeros({kRoom}, at::TensorOptions(dtype).device(device))});
  }

  void grow(DeviceSums& on_device) {
    const c10::InferenceMode normal_mode(false);
    const auto old = on_device.sums;
    on_device.sums = at::cat({old, at::zeros_like(old)});
    for (std::size_t i = 0; i < on_device.metrics.size(); ++i) {
      for (auto& sum : metrics_[on_device.metrics[i]].sums) {
        if (sum.device() == old.device())
          sum = on_device.sums.select(0, static_cast<std::int64_t>(i));
      }
    }
  }

  std::vector<Metric> metrics_;
  std::vector<DeviceSums> devices_;
  std::size_t next_ = 0;
};

DeferredMetrics::DeferredMetrics() : sums_(std::make_unique<Sums>()) {}
DeferredMetrics::DeferredMetrics(DeferredMetrics&&) noexcept = default;
DeferredMetrics& DeferredMetrics::operator=(DeferredMetrics&&) noexcept = default;
DeferredMetrics::~DeferredMetrics() = default;

void DeferredMetrics::add(std::string_view name, const Tensor& value, double weight) {
  sums_->add(name, value, weight);
}

Value::Dict DeferredMetrics::peek() const { return means_of(sums_->totals()); }

Value::Dict DeferredMetrics::read() {
  auto means = peek();
  sums_->reset();
  return means;
}

Value::Dict DeferredMetrics::reduce(std::source_location where) {
  if (detail::comm::is_alone(nullptr)) return read();
  // An error in here is sent to the other processes.
  const auto encode = [&] { return detail::comm::encode_object(sums_->totals()); };
  std::vector<NamedTotals> all;
  for (const auto& bytes :
       detail::comm::ObjectMessages::exchange(encode, nullptr, "DeferredMetrics::reduce", where)) {
    all.push_back(detail::comm::decode_object<NamedTotals>(bytes));
  }
  auto& first = all.front();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    require_names(all[rank], rank, first, 0);
    require_names(first, 0, all[rank], rank);
  }
  for (auto& [name, total] : first) {
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      const auto& other = *find(all[rank], name);
      total.sum += other.sum;
      total.weight += other.weight;
      total.count += other.count;
    }
  }
  sums_->reset();
  return means_of(first);
}

}  // namespace accelerate
