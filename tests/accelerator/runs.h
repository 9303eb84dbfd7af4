// tests/accelerator/runs.h - a small training run that is saved and loaded.
#pragma once

#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "accelerator/nets.h"
#include "support/command.h"

namespace accelerate::test {

/// Tests with a folder of their own.
class WithFolder : public Stateless {
 protected:
  Folder folder_;
  const std::filesystem::path& path_ = folder_.path();
};

/// What a program counts.
struct Progress {
  [[nodiscard]] Value state_dict() const { return Value::Dict{{"batches", batches}}; }
  void load_state_dict(const Value& state) { batches = state.at("batches").as_int(); }
  std::int64_t batches = 0;
};

inline AcceleratorOptions automatic(const std::filesystem::path& project,
                                    std::optional<std::int64_t> total_limit = std::nullopt) {
  return anew({.project_config = ProjectConfiguration{.project_dir = project,
                                                      .automatic_checkpoint_naming = true,
                                                      .total_limit = total_limit}});
}

/// An accelerator with one prepared model.
struct SavedRun {
  explicit SavedRun(const AcceleratorOptions& options = anew(), double value = 0)
      : accelerator(options), model(accelerator.prepare(net)) {
    fill(value);
  }
  void fill(double value) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(value);
  }
  /// That all parameters have, else NaN.
  [[nodiscard]] double value() const {
    const auto first = net->first->bias[0];
    for (const auto& parameter : net->parameters()) {
      if (!parameter.eq(first).all().item<bool>()) return std::nan("");
    }
    return first.item<double>();
  }

  Accelerator accelerator;
  Mlp net;
  PreparedModel<Mlp> model;
};

inline void write_text(const std::filesystem::path& file, const std::string& text) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

/// Another last byte, and the same size.
inline void damage(const std::filesystem::path& file) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(-1, std::ios::end);
  const int last = stream.get();
  stream.seekp(-1, std::ios::end);
  stream.put(static_cast<char>(last ^ 1));
}

}  // namespace accelerate::test
