// tests/comm/rank_groups.h - several groups of ranks in one set of processes, so that what takes
// ten seconds takes them once.
//
//     const RankGroups groups({2, 4});
//     const auto outcomes = run_processes(groups.processes(), groups.options({...}), f);
//     expect_something(groups.of(1, outcomes));
#pragma once

#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/on_processes.h"

namespace accelerate {

class RankGroups {
 public:
  using Words = std::vector<std::string>;

  explicit RankGroups(std::vector<int> sizes) : sizes_(std::move(sizes)) {}

  [[nodiscard]] int count() const { return static_cast<int>(sizes_.size()); }
  [[nodiscard]] int processes() const { return std::accumulate(sizes_.begin(), sizes_.end(), 0); }

  struct Place {
    int group = 0;
    int rank = 0;
  };
  [[nodiscard]] Place place_of(int process) const {
    int group = 0;
    while (process >= sizes_.at(static_cast<std::size_t>(group))) process -= size(group++);
    return {group, process};
  }
  /// In a rank: which group it is of.
  [[nodiscard]] static int own() { return std::stoi(std::getenv(kOwn)); }

  /// The command of a process as that of a rank of its group, all of one host or not.
  [[nodiscard]] Words as_rank(int process, const Words& argv) const {
    const auto [group, rank] = place_of(process);
    const auto set = [](const std::string& name, int value) {
      return name + "=" + std::to_string(value);
    };
    Words words = {"env", set(kOwn, group), set("RANK", rank), set("WORLD_SIZE", size(group))};
    words.insert(words.end(), argv.begin(), argv.end());
    return words;
  }

  /// All on one host. Each group meets at a file of its own and has one of the `variables`,
  /// NAME=value.
  [[nodiscard]] OnProcessesOptions options(OnProcessesOptions options,
                                           const std::vector<std::string>& variables) const {
    options.started_by = [self = *this, variables](int process, const Words& argv) {
      const auto [group, rank] = self.place_of(process);
      const auto& variable = variables.at(static_cast<std::size_t>(group));
      Words words = {"sh",
                     "-c",
                     "export ACCELERATE_DEBUG_RDV_FILE=$ACCELERATE_DEBUG_RDV_FILE." +
                         std::to_string(group) + "; exec \"$@\"",
                     "sh",
                     "env",
                     "LOCAL_RANK=" + std::to_string(rank),
                     "LOCAL_WORLD_SIZE=" + std::to_string(self.size(group)),
                     variable};
      const auto rest = self.as_rank(process, argv);
      words.insert(words.end(), rest.begin(), rest.end());
      return words;
    };
    return options;
  }

  [[nodiscard]] std::vector<RankOutcome> of(int group,
                                            const std::vector<RankOutcome>& outcomes) const {
    const auto first =
        outcomes.begin() + std::accumulate(sizes_.begin(), sizes_.begin() + group, 0);
    return {first, first + size(group)};
  }

 private:
  static constexpr const char* kOwn = "ACCELERATE_TEST_GROUP";

  [[nodiscard]] int size(int group) const { return sizes_[static_cast<std::size_t>(group)]; }

  std::vector<int> sizes_;
};

}  // namespace accelerate
