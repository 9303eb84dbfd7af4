// Collectives of ranks on several hosts: through shared memory on each and Gloo between them, and
// through Gloo alone. hosts.sh makes the hosts.
#include <torch/torch.h>

#include <cstdlib>
#include <numeric>

#include "support.h"

namespace {

// The same ranks, but with nothing but Gloo.
bench::Group gloo_alone(const bench::Group& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  ::setenv("ACCELERATE_HOST_BACKEND", "gloo", 1);
  return group->splitGroup(ranks, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
}

void measure(const std::string& name, const std::vector<bench::Group>& groups,
             const std::function<void(c10d::ProcessGroup&)>& call) {
  std::vector<std::function<void()>> variants;
  for (const auto& group : groups) variants.push_back([&] { call(*group); });
  const auto times = bench::in_turns(variants, /*rounds=*/9, /*round=*/50'000);
  bench::report(name, bench::median(times[0]), "us");
  bench::report(name + ", Gloo alone", bench::median(times[1]), "us");
}

void measure(const std::vector<bench::Group>& groups, const std::string& size, std::int64_t bytes) {
  std::vector<torch::Tensor> data{torch::ones({bytes / 4})};
  auto all = torch::ones({bytes / 4 * groups[0]->getSize()});
  measure("all-reduce " + size, groups, [&](auto& group) {
    c10d::AllreduceOptions options;
    options.asyncOp = false;
    group.allreduce(data, options)->wait();
  });
  measure("all-gather " + size, groups, [&](auto& group) {
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    group._allgather_base(all, data[0], options)->wait();
  });
  measure("broadcast " + size, groups, [&](auto& group) { group.broadcast(data)->wait(); });
}

}  // namespace

int main() {
  const accelerate::PartialState state({.cpu = true});
  at::set_num_threads(1);
  const auto group = state.process_group();
  const std::vector<bench::Group> groups{group, gloo_alone(group)};
  measure(groups, "8 B", 8);
  measure(groups, "1 KB", 1 << 10);
  measure(groups, "64 KB", 64 << 10);
  measure(groups, "4 MB", 4 << 20);
  measure(groups, "64 MB", 64 << 20);
  measure("barrier", groups, [](auto& each) { each.barrier()->wait(); });
}
