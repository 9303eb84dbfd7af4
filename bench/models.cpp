// A model in a folder: save_model and load_checkpoint_in_model, in one file and in shards
// (BENCH_FILES_MB: its size). models.py does the same with Python Accelerate.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>

#include "support.h"

namespace {

struct Layers : torch::nn::Module {
  explicit Layers(std::int64_t megabytes) {
    for (std::int64_t i = 0; i < std::max<std::int64_t>(1, megabytes / 4); ++i) {
      register_module("layer" + std::to_string(i), torch::nn::Linear(1024, 1024));
    }
  }
};

double megabytes_of(const torch::nn::Module& model) {
  double bytes = 0;
  for (const auto& parameter : model.parameters()) bytes += static_cast<double>(parameter.nbytes());
  return bytes / 1e6;
}

}  // namespace

int main() {
  const char* size = std::getenv("BENCH_FILES_MB");
  const accelerate::Accelerator accelerator({.cpu = true});
  const auto model = std::make_shared<Layers>(size != nullptr ? std::atoll(size) : 1000);
  const double megabytes = megabytes_of(*model);
  const auto folder =
      std::filesystem::temp_directory_path() / ("bench_models." + std::to_string(::getpid()));
  const auto rate = [&](const std::function<void()>& f) {
    return megabytes / (bench::microseconds(1, f) / 1e6);
  };
  for (const auto* const limit : {"10GB", "100MB"}) {
    for (const bool safe : {true, false}) {
      const std::string kind =
          std::string(safe ? "safetensors" : "archives") + ", shards of " + limit;
      const auto target = folder / kind;
      ::sync();
      bench::report("save_model, " + kind, rate([&] {
                      accelerator.save_model(model, target,
                                             {.max_shard_size = limit, .safe_serialization = safe});
                    }),
                    "MB/s");
      bench::report("load_checkpoint_in_model, " + kind,
                    rate([&] { accelerate::load_checkpoint_in_model(*model, target); }), "MB/s");
      std::filesystem::remove_all(target);
    }
  }
  std::filesystem::remove_all(folder);
}
