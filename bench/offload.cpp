// Weights that come and go. On the CPU: what an operator on a managed parameter costs, building
// 10^11 parameters without memory, disk_offload through mapped files. On a GPU: cpu_offload and
// disk_offload against the rate of the bus, training, load_checkpoint_and_dispatch.
//
//   BENCH_OFFLOAD_GB      size of the model, bfloat16 (10 on a GPU, 0.2 on the CPU)
//   BENCH_OFFLOAD_WIDTH   of its layers (8192; 2048 on the CPU)
//
// offload.py does the same with Python Accelerate.
#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "support.h"

namespace {

namespace fs = std::filesystem;
using bench::report;

double number(const char* name, double fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atof(text) : fallback;
}

struct LayersImpl : torch::nn::Module {
  LayersImpl(std::int64_t count, std::int64_t width) {
    for (std::int64_t i = 0; i < count; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
      for (const auto& parameter : layers.back()->parameters()) {
        parameter.set_data(parameter.detach().to(torch::kBFloat16));
      }
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::gelu(layer->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

/// With values, which do not matter: random ones would take longer than all that is measured.
Layers filled(std::int64_t count, std::int64_t width) {
  auto net = accelerate::init_empty_weights([&] { return Layers(count, width); });
  for (const auto& item : net->named_parameters()) {
    accelerate::set_module_tensor_to_device(
        *net, item.key(), torch::kCPU,
        {.value = torch::full(item.value().sizes(), 1e-3, torch::kBFloat16)});
  }
  return net;
}

void synchronize(torch::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize();
}

double seconds(torch::Device device, int repeats, const std::function<void()>& f) {
  synchronize(device);
  return bench::microseconds(1,
                             [&] {
                               for (int i = 0; i < repeats; ++i) f();
                               synchronize(device);
                             }) /
         1e6 / repeats;
}

double resident_megabytes() {
  std::ifstream status("/proc/self/statm");
  long pages = 0;
  status >> pages >> pages;
  return static_cast<double>(pages) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / 1e6;
}

void empty_parameters() {
  const double before = resident_megabytes();
  std::shared_ptr<torch::nn::SequentialImpl> model;
  const double time = seconds(torch::kCPU, 1, [&] {
    model = accelerate::init_empty_weights([] {
      auto layers = std::make_shared<torch::nn::SequentialImpl>();
      for (int i = 0; i < 1000; ++i) layers->push_back(torch::nn::Linear(10'000, 10'000));
      return layers;
    });
  });
  report("init_empty_weights, 10^11 parameters", time, "s");
  report("  memory for it", resident_megabytes() - before, "MB");
}

/// The smallest operator that reads a parameter, plain and managed.
void cost_of_an_operator() {
  const torch::NoGradGuard no_grad;
  constexpr int kRepeats = 200'000;
  Layers plain(2, 8);
  const auto time = [](const torch::Tensor& tensor) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      best = std::min(best, bench::microseconds(kRepeats, [&] { (void)tensor.neg(); }));
    }
    return best;
  };
  const double other_before = time(plain->layers[1]->bias);
  const double before = time(plain->layers[0]->bias);
  Layers managed(1, 8);
  const auto model = accelerate::cpu_offload(managed, {.lazy = {.manage_on_cpu = true}});
  report("operator on a managed parameter, added", time(managed->layers[0]->bias) - before, "us");
  report("operator on any other tensor, added", time(plain->layers[1]->bias) - other_before, "us");
}

double pinned_rate(torch::Device device) {
  const auto host =
      torch::empty({512 << 20}, torch::TensorOptions(torch::kByte).pinned_memory(true));
  const auto there = torch::empty_like(host, device);
  const auto copy = [&] { there.copy_(host, /*non_blocking=*/true); };
  copy();  // pages of new memory are slower
  const double time = seconds(device, 8, copy);
  return static_cast<double>(host.nbytes()) / time / 1e9;
}

double training_milliseconds(const auto& model, std::int64_t width, torch::Device device) {
  const auto x = torch::randn({64, width}, torch::TensorOptions(torch::kBFloat16).device(device));
  model(x).sum().backward();
  return 1e3 * seconds(device, 2, [&] { model(x).sum().backward(); });
}

void forwards(const std::string& name, const auto& model, double gigabytes, std::int64_t width,
              torch::Device device, double bus) {
  const torch::NoGradGuard no_grad;
  for (const std::int64_t batch : {1, 4, 16, 64}) {
    const auto x =
        torch::randn({batch, width}, torch::TensorOptions(torch::kBFloat16).device(device));
    model(x);  // learns the order
    const double rate = gigabytes / seconds(device, 3, [&] { model(x); });
    report(name + ", batch " + std::to_string(batch), rate, "GB/s");
    if (bus > 0) report("  of the pinned bus", 100 * rate / bus, "%");
  }
}

/// A quarter of the layers stays on the GPU: the most that its allocator gives in a forward,
/// against what the map puts there and the ring.
void gpu_peak(Layers& net, std::int64_t width, torch::Device device) {
  accelerate::DeviceMap map;
  std::int64_t planned = 0;
  for (std::size_t i = 0; i < net->layers.size(); ++i) {
    const bool stays = i < net->layers.size() / 4;
    map.set("layer" + std::to_string(i),
            stays ? accelerate::MapDevice(0) : accelerate::MapDevice("cpu"));
    for (const auto& parameter : net->layers[i]->parameters()) {
      if (stays) planned += static_cast<std::int64_t>(parameter.nbytes());
    }
  }
  auto* allocator = c10::getDeviceAllocator(device.type());
  const auto held = [&] { return allocator->getDeviceStats(0).allocated_bytes[0]; };
  const auto before = held().current;
  const auto model = accelerate::dispatch_model(net, map);
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({1, width}, torch::TensorOptions(torch::kBFloat16).device(device));
  allocator->resetPeakStats(0);
  for (int i = 0; i < 3; ++i) model(x);
  synchronize(device);
  const auto peak = static_cast<double>(held().peak - before);
  const auto expected = static_cast<double>(planned + model.stats().peak_resident_bytes);
  report("a quarter on the GPU, rest on the CPU: peak", peak / 1e6, "MB");
  report("  of the planned bytes and the ring", 100 * peak / expected, "%");
}

}  // namespace

int main() {
  const accelerate::PartialState state;
  const auto device = state.device();
  const bool gpu = device.is_cuda();
  const auto width = static_cast<std::int64_t>(number("BENCH_OFFLOAD_WIDTH", gpu ? 8192 : 2048));
  const auto layer_gigabytes = static_cast<double>(2 * width * (width + 1)) / 1e9;
  const auto count = std::max<std::int64_t>(
      2, static_cast<std::int64_t>(number("BENCH_OFFLOAD_GB", gpu ? 10 : 0.2) / layer_gigabytes));
  const double gigabytes = static_cast<double>(count) * layer_gigabytes;
  const auto folder = fs::temp_directory_path() / ("bench_offload." + std::to_string(::getpid()));

  if (!gpu) {
    empty_parameters();
    cost_of_an_operator();
  }
  const double bus = gpu ? pinned_rate(device) : 0;
  if (gpu) report("pinned memory to the GPU", bus, "GB/s");

  auto net = filled(count, width);
  const accelerate::Accelerator accelerator;
  accelerator.save_model(net, folder / "checkpoint", {.max_shard_size = "1TB"});
  if (gpu) {
    // What reading and copying in parallel can do.
    const auto file = folder / "checkpoint" / "model.safetensors";
    const double time =
        seconds(device, 2, [&] { (void)accelerate::safetensors::load_file(file, device); });
    report("safetensors from the page cache to the GPU", gigabytes / time, "GB/s");
    auto resident = filled(count, width);
    resident->to(device);
    report("resident, forward and backward, batch 64",
           training_milliseconds([&](const torch::Tensor& x) { return resident->forward(x); },
                                 width, device),
           "ms");
  }
  {
    const auto model = accelerate::cpu_offload(net, {.execution_device = device});
    forwards("cpu_offload forward", model, gigabytes, width, device, bus);
    report("cpu_offload, forward and backward, batch 64",
           training_milliseconds(model, width, device), "ms");
    report("  peak of the ring", static_cast<double>(model.stats().peak_resident_bytes) / 1e6,
           "MB");
    net->zero_grad();
  }
  if (gpu) gpu_peak(net, width, device);
  {
    const auto model =
        accelerate::disk_offload(net, folder / "spill", {.execution_device = device});
    forwards("disk_offload forward", model, gigabytes, width, device, bus);
  }
  fs::remove_all(folder / "spill");
  {
    auto empty = accelerate::init_empty_weights([&] { return Layers(count, width); });
    accelerate::DeviceMap map{{"", gpu ? "0" : "cpu"}};
    const double time = seconds(device, 1, [&] {
      (void)accelerate::load_checkpoint_and_dispatch(empty, folder / "checkpoint",
                                                     {.device_map = map});
    });
    report("load_checkpoint_and_dispatch", gigabytes / time, "GB/s");
  }
  fs::remove_all(folder);
}
