#include "shard_schedule.h"

#include <algorithm>
#include <vector>

namespace accelerate::tools {
namespace {

/// Walks through one step with two clocks: until when the process computes, and until when its link
/// is taken.
class Step {
 public:
  explicit Step(const Setting& setting) : set_(setting) {}

  Outcome run() {
    for (std::int64_t i = 0; i < set_.micro_batches; ++i) {
      const bool last = i + 1 == set_.micro_batches;
      pass(/*backward=*/false, /*reduces=*/false);
      pass(/*backward=*/true, last || reduces_each());
    }
    if (set_.sharding == Sharding::kOptimizer || set_.sharding == Sharding::kGradients) {
      for (std::int64_t i = 0; i < set_.units; ++i) gather(std::max(compute_, link_));
    }
    result_.exposed_seconds = std::max(compute_, link_) - result_.compute_seconds;
    result_.memory_bytes = memory();
    return result_;
  }

 private:
  [[nodiscard]] double unit() const { return set_.parameters / static_cast<double>(set_.units); }
  [[nodiscard]] bool reduces_each() const {
    return set_.sharding == Sharding::kGradients ||
           (set_.sharding == Sharding::kParameters && !set_.accumulate_unsharded);
  }
  [[nodiscard]] bool is_gathered(std::int64_t unit, bool backward) const {
    if (set_.sharding != Sharding::kParameters) return false;
    return !backward || (set_.reshard && unit < set_.units - set_.kept_units);
  }

  /// A ring over `ranks` in which each process sends `rounds` times all parts of `bytes` but one.
  /// Returns when it has ended.
  double ring(double bytes, std::int64_t ranks, double rounds, const Link& link, double issued) {
    const auto steps = rounds * static_cast<double>(ranks - 1);
    const double sent = steps / static_cast<double>(ranks) * bytes;
    result_.bytes_sent += sent;
    ++result_.calls;
    link_ = std::max(link_, issued) + steps * link.latency_seconds + sent / link.bytes_per_second;
    return link_;
  }
  double gather(double issued) {
    return ring(unit() * set_.param_bytes, set_.shard_ranks, 1, set_.shard_link, issued);
  }
  void reduce(double issued) {
    const bool whole = set_.sharding == Sharding::kNone;
    ring(unit() * set_.reduce_bytes, set_.shard_ranks, whole ? 2 : 1, set_.shard_link, issued);
    if (set_.replicas == 1) return;
    const double shard = unit() * set_.reduce_bytes / static_cast<double>(set_.shard_ranks);
    ring(shard, set_.replicas, 2, set_.replica_link, issued);
  }

  /// All units, in their order or, in backward, the reverse.
  void pass(bool backward, bool reduces) {
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < set_.units; ++i) {
      order.push_back(backward ? set_.units - 1 - i : i);
    }
    std::vector<double> there(order.size(), 0);  // when a unit is gathered
    std::size_t issued = 0;
    const auto issue = [&](std::size_t end) {
      for (; issued < std::min(end, order.size()); ++issued) {
        if (is_gathered(order[issued], backward)) there[issued] = gather(compute_);
      }
    };
    for (std::size_t i = 0; i < order.size(); ++i) {
      issue(i + 1);
      compute_ = std::max(compute_, there[i]);
      issue(i + 1 + static_cast<std::size_t>(set_.prefetch));
      const double seconds = backward ? set_.backward_seconds : set_.forward_seconds;
      compute_ += seconds;
      result_.compute_seconds += seconds;
      if (reduces) reduce(compute_);
    }
  }

  [[nodiscard]] double memory() const {
    const double all = set_.parameters;
    const double part = all / static_cast<double>(set_.shard_ranks);
    switch (set_.sharding) {
      case Sharding::kNone:
        return 16 * all;
      case Sharding::kOptimizer:
        return 4 * all + 12 * part;
      case Sharding::kGradients:
        return 2 * all + 14 * part;
      case Sharding::kParameters:
        break;
    }
    const double live = set_.reshard ? static_cast<double>(1 + set_.prefetch) * unit() : all;
    const bool whole = set_.accumulate_unsharded && set_.micro_batches > 1;
    return 16 * part + set_.param_bytes * live + set_.reduce_bytes * (whole ? all : unit());
  }

  Setting set_;
  Outcome result_ = {};
  double compute_ = 0;
  double link_ = 0;
};

}  // namespace

Outcome simulate(const Setting& setting) { return Step(setting).run(); }

}  // namespace accelerate::tools
