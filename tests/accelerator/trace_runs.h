// tests/accelerator/trace_runs.h - the runs of tests/reference/traces/cases.json, which Python
// Accelerate makes too, number by number.
//
//     const auto grid = read_json(reference_path("traces/cases.json"));
//     const TraceData data(grid);
//     for (const auto& one : cases_for(grid, 2)) compare(run_trace(grid, one, data), stored);
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace accelerate::test {

using Json = nlohmann::json;

[[nodiscard]] Json read_json(const std::filesystem::path& path);

/// The cases that are run with this many processes.
[[nodiscard]] std::vector<Json> cases_for(const Json& grid, int ranks);

/// What all runs of a model begin with. Made of whole numbers, so that it is the same everywhere.
struct TraceModel {
  torch::Tensor inputs;
  torch::Tensor targets;
  std::map<std::string, torch::Tensor> weights;  // by the name of the parameter
};
class TraceData {
 public:
  explicit TraceData(const Json& grid);
  [[nodiscard]] const TraceModel& of(const std::string& model) const { return models_.at(model); }
  /// A file that Python's `torch.load` reads as {model: {inputs, targets, weights: {name:
  /// tensor}}}.
  void save(const std::filesystem::path& path) const;

 private:
  std::map<std::string, TraceModel> models_;
};

/// Collective. Trains as write_traces.py does and returns what that writes: batches, synced,
/// losses, rates, norms. Makes an accelerator of its own.
[[nodiscard]] Json run_trace(const Json& grid, const Json& one, const TraceData& data);

/// The largest differences of two traces.
struct TraceDifference {
  double loss = 0;
  double rate = 0;
  double norm = 0;
  /// Numbers of batches, of steps, or which of them were complete differ.
  bool course = false;
};
[[nodiscard]] TraceDifference compare(const Json& a, const Json& b);

/// How far the losses of a case may be from Python's.
[[nodiscard]] double tolerance_of(const Json& one);
/// The same for the norms of its gradients, which jump where a ReLU or a maximum changes sides and
/// the loss does not.
[[nodiscard]] double norm_tolerance_of(const Json& one);

}  // namespace accelerate::test
