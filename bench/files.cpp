// Saving and loading a model of 1 GB (BENCH_FILES_MB: another size), and opening 100,000 tensors;
// files.py does the same with Python's safetensors, torch.save and load_checkpoint_in_model. Beside
// them the rates of disk, memory, page cache and bus.
#include <accelerate/accelerate.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "disk.h"

namespace {

namespace st = accelerate::safetensors;
using bench::report;
using bench::seconds;
using bench::write_plain;

constexpr int kRounds = 5;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// Median seconds, after one call that is not counted. `before` is called before each other one.
double median_seconds(const std::function<void()>& f, const std::function<void()>& before = [] {}) {
  f();
  std::vector<double> times;
  for (int i = 0; i < kRounds; ++i) {
    before();
    times.push_back(seconds(f));
  }
  return median(times);
}

std::int64_t megabytes() {
  const char* text = std::getenv("BENCH_FILES_MB");
  return text != nullptr ? std::atoll(text) : 1000;
}

// Layers of a transformer in bfloat16: matrices of 32 MB and vectors of 8 KB.
accelerate::StateDict make_model() {
  accelerate::StateDict model;
  const auto layers = std::max<std::int64_t>(1, megabytes() / 32);
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto name = "model.layers." + std::to_string(i);
    model.insert(name + ".weight", torch::ones({4096, 4096}, torch::kBFloat16));
    model.insert(name + ".norm", torch::ones({4096}, torch::kBFloat16));
  }
  return model;
}

// The first large write of a process also pays for the page cache that makes room for it, and a
// writer must not pay for what the one before it left to be flushed. So there is a write that is
// not counted, and the two take turns at going first.
void compare_with_disk(const accelerate::StateDict& model, const std::filesystem::path& path,
                       std::int64_t bytes) {
  const auto other = path.parent_path() / "plain";
  std::vector<double> disk;
  std::vector<double> save;
  const auto time = [](std::vector<double>& times, const std::filesystem::path& file,
                       const std::function<void()>& f) {
    std::filesystem::remove(file);
    ::sync();
    times.push_back(seconds(f));
  };
  write_plain(other, bytes);
  for (int i = 0; i < kRounds; ++i) {
    for (const bool ours : {i % 2 == 0, i % 2 != 0}) {
      if (ours) {
        time(save, path, [&] { st::save_file(model, path); });
      } else {
        time(disk, other, [&] { write_plain(other, bytes); });
      }
    }
  }
  std::filesystem::remove(other);
  const double mb = static_cast<double>(bytes) / 1e6;
  report("disk: write and fsync", mb / median(disk), "MB/s");
  report("save, with fsync", mb / median(save), "MB/s");
}

void save_and_load_archive(const accelerate::StateDict& model, const std::filesystem::path& path,
                           double mb,
                           const std::function<void(const accelerate::StateDict&)>& read_all) {
  const auto start_clean = [&] {
    std::filesystem::remove(path);
    ::sync();
  };
  const auto save = median_seconds([&] { accelerate::torch_save(model, path); }, start_clean);
  report("torch_save, with fsync", mb / save, "MB/s");
  report("torch_load into memory", mb / median_seconds([&] { (void)accelerate::torch_load(path); }),
         "MB/s");
  report("torch_load, mapped, no byte touched",
         1e6 * median_seconds([&] { (void)accelerate::torch_load(path, {.mmap = true}); }), "us");
  // load_state_dict maps archives.
  report("torch_load, mapped, every byte read once",
         mb / median_seconds([&] { read_all(accelerate::load_state_dict(path)); }), "MB/s");
}

/// Reads a file that is in the page cache with `threads` threads, each into a buffer of its own.
void read_cached(const std::filesystem::path& path, std::int64_t bytes, int threads) {
  constexpr std::int64_t kBlock = 4 << 20;
  const int fd = ::open(path.c_str(), O_RDONLY);
  std::vector<std::jthread> readers;
  for (int i = 0; i < threads; ++i) {
    readers.emplace_back([=] {
      thread_local std::vector<char> buffer(kBlock);
      for (std::int64_t at = i * kBlock; at < bytes; at += threads * kBlock) {
        if (::pread(fd, buffer.data(), kBlock, at) < 0) std::abort();
      }
    });
  }
  readers.clear();
  ::close(fd);
}

/// A model on the GPU that is filled from the file, and the rates that bound it.
void load_to_gpu(const accelerate::StateDict& model, const std::filesystem::path& path,
                 std::int64_t bytes) {
  const double mb = static_cast<double>(bytes) / 1e6;
  for (const int threads : {1, 4, 8}) {
    report("page cache: read, " + std::to_string(threads) + " threads",
           mb / median_seconds([&] { read_cached(path, bytes, threads); }), "MB/s");
  }
  const auto pinned =
      torch::ones({1 << 28}, torch::TensorOptions(torch::kByte).pinned_memory(true));
  const auto on_gpu = torch::empty_like(pinned, torch::kCUDA);
  const auto copy = median_seconds([&] {
    on_gpu.copy_(pinned, true);
    torch::cuda::synchronize();
  });
  report("bus: pinned memory to the GPU", static_cast<double>(pinned.nbytes()) / 1e6 / copy,
         "MB/s");
  report("load to the GPU", mb / median_seconds([&] {
                              const auto tensors = st::load_file(path, torch::kCUDA);
                              torch::cuda::synchronize();
                            }),
         "MB/s");
  auto layers = std::make_shared<torch::nn::Module>();
  for (std::size_t i = 0; i < model.size() / 2; ++i) {
    auto layer = std::make_shared<torch::nn::Module>();
    for (const std::string name : {"weight", "norm"}) {
      const auto& like = model["model.layers." + std::to_string(i) + '.' + name];
      layer->register_parameter(name, torch::empty_like(like, torch::kCUDA), false);
    }
    layers->register_module(std::to_string(i), layer);
  }
  auto inner = std::make_shared<torch::nn::Module>();
  inner->register_module("layers", layers);
  torch::nn::Module net;
  net.register_module("model", inner);
  report("load_checkpoint_in_model on the GPU",
         mb / median_seconds([&] {
           const auto result = accelerate::load_checkpoint_in_model(net, path);
           if (!result.missing_keys.empty()) std::abort();
           torch::cuda::synchronize();
         }),
         "MB/s");
}

void save_and_load(const std::filesystem::path& folder) {
  const auto model = make_model();
  const auto path = folder / "model.safetensors";
  std::int64_t bytes = 0;
  for (const auto& item : model) bytes += static_cast<std::int64_t>(item.value().nbytes());
  const double mb = static_cast<double>(bytes) / 1e6;
  compare_with_disk(model, path, bytes);

  const std::vector<char> from(256 << 20, 'x');
  std::vector<char> to(from.size());
  const auto copy = median_seconds([&] { std::memcpy(to.data(), from.data(), from.size()); });
  report("memory: copy", static_cast<double>(from.size()) / 1e6 / copy, "MB/s");
  std::int64_t sum = 0;
  const auto read_all = [&](const accelerate::StateDict& tensors) {
    for (const auto& item : tensors) {
      sum += item.value().view(torch::kLong).sum().item<std::int64_t>();
    }
  };
  report("memory: every byte read once", mb / median_seconds([&] { read_all(model); }), "MB/s");
  report("load, mapped, no byte touched", 1e6 * median_seconds([&] { (void)st::load_file(path); }),
         "us");
  report("load, mapped, every byte read once",
         mb / median_seconds([&] { read_all(st::load_file(path)); }), "MB/s");
  report("load into memory",
         mb / median_seconds([&] { (void)st::File::open(path, {.mapped = false}).get_tensors(); }),
         "MB/s");
  if (torch::cuda::is_available()) load_to_gpu(model, path, bytes);
  std::filesystem::remove(path);
  save_and_load_archive(model, folder / "model.bin", mb, read_all);
  if (sum == 0) std::abort();
}

void open_many(const std::filesystem::path& folder) {
  accelerate::StateDict tensors;
  const auto all = torch::zeros({200'000});
  for (std::int64_t i = 0; i < 100'000; ++i) {
    tensors.insert("model.layers." + std::to_string(i) + ".mlp.weight",
                   all.slice(0, 2 * i, 2 * i + 2));
  }
  st::save_file(tensors, folder / "many.safetensors");
  report("open, 100,000 tensors",
         1e3 * median_seconds([&] { (void)st::File::open(folder / "many.safetensors").keys(); }),
         "ms");
}

}  // namespace

int main() {
  const auto folder =
      std::filesystem::temp_directory_path() / ("bench_files." + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  save_and_load(folder);
  open_many(folder);
  std::filesystem::remove_all(folder);
}
