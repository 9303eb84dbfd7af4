// Steps of data-parallel training: alone, as a prepared model takes them, and with c10d's Reducer
// over Gloo as they come with LibTorch; ddp.py does the same with Python's DistributedDataParallel.
#include <torch/torch.h>

#include <memory>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>

#include "mlp.h"
#include "parallel/data_parallel.h"
#include "support.h"

namespace {

constexpr std::int64_t kBatch = 64;
// As Python's: a small first bucket, so that something is under way early.
constexpr std::int64_t kFirstBucketBytes = 1 << 20;
constexpr std::int64_t kBucketBytes = 25 << 20;

std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                            const bench::Group& group) {
  auto [buckets, limits] =
      c10d::compute_bucket_assignment_by_size(parameters, {kFirstBucketBytes, kBucketBytes});
  std::ranges::reverse(buckets);
  std::ranges::reverse(limits);
  return std::make_unique<c10d::Reducer>(
      parameters, buckets, group, std::vector<bool>(parameters.size(), false), kBucketBytes,
      /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true,
      std::unordered_map<std::size_t, std::string>{}, kFirstBucketBytes,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      std::vector<std::int64_t>(limits.begin(), limits.end()));
}

class Training {
 public:
  explicit Training(const std::vector<std::int64_t>& widths)
      : net_(bench::make_mlp(widths)),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01)),
        input_(torch::randn({kBatch, widths.front()})),
        target_(torch::randint(widths.back(), {kBatch})) {}

  /// Averages gradients as a prepared model does.
  void average_as_prepared(const bench::Group& group) {
    parallel_ = std::make_unique<accelerate::detail::parallel::DataParallel>(
        *net_, group, accelerate::DistributedDataParallelKwargs{});
  }
  /// Averages gradients with c10d's Reducer alone.
  void average_by_reducer(const bench::Group& group) {
    reducer_ = make_reducer(net_->parameters(), group);
  }

  void step() {
    // Not zero_grad, which detaches what it lets go of: a view of a bucket cannot be detached.
    for (auto& parameter : net_->parameters()) parameter.mutable_grad() = torch::Tensor();
    if (reducer_) reducer_->prepare_for_forward();
    const auto loss = torch::nn::functional::cross_entropy(net_->forward(input_), target_);
    if (parallel_) {
      reached_.walk(loss);
      parallel_->before_backward({loss, reached_});
    }
    if (reducer_) {
      reducer_->rebuild_buckets();
      reducer_->prepare_for_backward({loss});
    }
    loss.backward();
    if (parallel_) parallel_->after_backward();
    optimizer_.step();
  }

 private:
  torch::nn::Sequential net_;
  torch::optim::SGD optimizer_;
  torch::Tensor input_;
  torch::Tensor target_;
  accelerate::detail::parallel::ReachedLeaves reached_;
  std::unique_ptr<accelerate::detail::parallel::DataParallel> parallel_;
  std::unique_ptr<c10d::Reducer> reducer_;
};

void measure(const std::string& name, const std::vector<std::int64_t>& widths,
             const bench::Group& ours, const bench::Group& gloo) {
  Training alone(widths);
  Training with_ours(widths);
  with_ours.average_as_prepared(ours);
  Training with_gloo(widths);
  with_gloo.average_by_reducer(gloo);
  const auto times =
      bench::in_turns({[&] { alone.step(); }, [&] { with_ours.step(); }, [&] { with_gloo.step(); }},
                      /*rounds=*/11, /*round=*/60'000);
  const auto beyond_alone = [&](std::size_t which) {
    std::vector<double> differences;
    for (std::size_t i = 0; i < times[0].size(); ++i) {
      differences.push_back(times[which][i] - times[0][i]);
    }
    return bench::median(differences);
  };
  bench::report(name + ": local step", bench::median(times[0]), "us");
  bench::report(name + ": DDP step", bench::median(times[1]), "us");
  bench::report(name + ": DDP step, raw Gloo", bench::median(times[2]), "us");
  bench::report(name + ": above the local step", beyond_alone(1), "us");
  bench::report(name + ": above the local step, raw Gloo", beyond_alone(2), "us");
}

}  // namespace

int main() {
  const accelerate::PartialState state({.cpu = true});
  at::set_num_threads(1);
  const auto ours = state.process_group();
  const auto gloo = bench::raw_gloo();
  bench::settle();
  measure("MLP 784-128-10", {784, 128, 10}, ours, gloo);
  measure("MLP 784-1024-1024-10", {784, 1024, 1024, 10}, ours, gloo);
}
