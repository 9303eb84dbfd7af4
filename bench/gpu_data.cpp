// What feeding a GPU costs: training steps on batches that are there already, and on batches of a
// loader, in turns. The first number is the limit.
//
//     bench_gpu_data              prints both
//     bench_gpu_data TRACE.json   writes what the GPU did in some steps, for chrome://tracing
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <memory>
#include <set>
#include <utility>

#include "support.h"

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr std::int64_t kWidth = 256;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kVocabulary = 512;
constexpr std::int64_t kLength = 256;
// The host can just keep up with the GPU, or has time to spare.
constexpr std::int64_t kSmallBatch = 64;
constexpr std::int64_t kLargeBatch = 256;
constexpr std::int64_t kSequences = 64 * 1024;

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("norm1", norm1);
    register_module("attend", attend);
    register_module("project", project);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = attend(norm1(x)).view({-1, kLength, 3, kHeads, kWidth / kHeads}).unbind(2);
    const auto heads = [&](int i) { return parts[i].transpose(1, 2); };
    const auto mixed =
        at::scaled_dot_product_attention(heads(0), heads(1), heads(2), {}, 0.0, /*is_causal=*/true);
    x = x + project(mixed.transpose(1, 2).reshape({-1, kLength, kWidth}));
    return x + down(torch::gelu(up(norm2(x))));
  }
  nn::LayerNorm norm1{nn::LayerNormOptions({kWidth})}, norm2{nn::LayerNormOptions({kWidth})};
  nn::Linear attend{kWidth, 3 * kWidth}, project{kWidth, kWidth};
  nn::Linear up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl() {
    register_module("tokens", tokens);
    register_module("places", places);
    for (int i = 0; i < kLayers; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    register_module("norm", norm);
  }
  torch::Tensor forward(const torch::Tensor& input) {
    auto x = tokens(input) + places->weight;
    x = norm(blocks->forward(x));
    return x.matmul(tokens->weight.t());
  }
  nn::Embedding tokens{kVocabulary, kWidth}, places{kLength, kWidth};
  nn::Sequential blocks;
  nn::LayerNorm norm{nn::LayerNormOptions({kWidth})};
};
TORCH_MODULE(Gpt);

class Training {
 public:
  explicit Training(at::Device device) { net_->to(device); }

  void step(const torch::Tensor& batch) {  // [batch, length + 1]
    optimizer_.zero_grad();
    const auto logits = net_->forward(batch.slice(1, 0, kLength));
    F::cross_entropy(logits.flatten(0, 1), batch.slice(1, 1).flatten()).backward();
    optimizer_.step();
  }
  [[nodiscard]] std::int64_t size() const {
    std::int64_t elements = 0;
    for (const auto& parameter : net_->parameters()) elements += parameter.numel();
    return elements;
  }

 private:
  Gpt net_;
  torch::optim::AdamW optimizer_{net_->parameters(), torch::optim::AdamWOptions(1e-4)};
};

/// Batches without an end.
class Endless {
 public:
  explicit Endless(accelerate::DataLoader<torch::Tensor> loader)
      : loader_(std::move(loader)), at_(loader_.begin()) {}
  const torch::Tensor& next() {
    if (started_) ++at_;
    if (at_ == loader_.end()) at_ = loader_.begin();
    started_ = true;
    return *at_;
  }

 private:
  accelerate::DataLoader<torch::Tensor> loader_;
  decltype(std::declval<accelerate::DataLoader<torch::Tensor>&>().begin()) at_;
  bool started_ = false;
};

double milliseconds(int steps, const std::function<void()>& step) {
  torch::cuda::synchronize();
  const double time = bench::microseconds(1, [&] {
    for (int i = 0; i < steps; ++i) step();
    torch::cuda::synchronize();
  });
  return time / 1e3 / steps;
}

void trace(const std::string& path, const std::function<void()>& step) {
  namespace profiler = torch::autograd::profiler;
  const std::set activities{profiler::ActivityType::CPU, profiler::ActivityType::CUDA};
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  for (int i = 0; i < 10; ++i) step();
  torch::cuda::synchronize();
  profiler::disableProfiler()->save(path);
}

/// The same steps, on one batch and on those of a loader.
class Cases {
 public:
  Cases(const torch::Tensor& data, std::int64_t batch_size, at::Device device)
      : training_(device), fixed_(data.slice(0, 0, batch_size).to(device)) {
    add("fixed inputs", [this] { training_.step(fixed_); });
    for (const std::int64_t workers : {0, 2}) {
      const auto batches = std::make_shared<Endless>(accelerate::prepare_data_loader(
          accelerate::make_data_loader(
              data, {.batch_size = batch_size, .shuffle = true, .num_workers = workers}),
          {.put_on_device = true}));
      add("loader, " + std::to_string(workers) + " workers",
          [this, batches] { training_.step(batches->next()); });
    }
  }

  void measure(const std::string& title) {
    std::vector<std::vector<double>> times(steps_.size());
    for (const auto& [name, step] : steps_) milliseconds(20, step);
    for (int round = 0; round < 9; ++round) {
      for (std::size_t i = 0; i < steps_.size(); ++i) {
        times[i].push_back(milliseconds(40, steps_[i].second));
      }
    }
    const double limit = bench::median(times[0]);
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const double time = bench::median(times[i]);
      bench::report(title + ", " + steps_[i].first, time, "ms");
      if (i > 0) bench::report(title + ", " + steps_[i].first + " / fixed", time / limit, "x");
    }
  }

  void write_trace(const std::string& path) {
    const auto& step = steps_[1].second;
    for (int i = 0; i < 20; ++i) step();
    trace(path, step);
  }

 private:
  void add(const std::string& name, std::function<void()> step) {
    steps_.emplace_back(name, std::move(step));
  }

  Training training_;
  torch::Tensor fixed_;
  std::vector<std::pair<std::string, std::function<void()>>> steps_;
};

}  // namespace

int main(int argc, char** argv) {
  const accelerate::PartialState state;
  if (!state.device().is_cuda()) {
    std::cerr << "bench_gpu_data: no GPU can be used here\n";
    return 1;
  }
  const auto data = torch::randint(kVocabulary, {kSequences, kLength + 1});
  if (argc > 1) {
    Cases(data, kLargeBatch, state.device()).write_trace(argv[1]);
    return 0;
  }
  bench::report("parameters of the GPT", Training(state.device()).size() / 1e6, "M");
  for (const auto batch_size : {kSmallBatch, kLargeBatch}) {
    Cases(data, batch_size, state.device())
        .measure("GPT, batches of " + std::to_string(batch_size));
  }
}
