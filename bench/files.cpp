// Saving and loading a model of 1 GB (BENCH_FILES_MB: another size), and opening 100,000 tensors;
// files.py does the same with Python's safetensors. Beside them the rates of disk and memory.
#include <accelerate/accelerate.h>
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

namespace st = accelerate::safetensors;
using Clock = std::chrono::steady_clock;

double seconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void report(const std::string& name, double value, const char* unit) {
  std::cout << name << '\t' << value << '\t' << unit << std::endl;
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

// What dd with conv=fsync does, from memory that is warm.
void write_plain(const std::filesystem::path& path, std::int64_t bytes) {
  const std::vector<char> block(8 << 20, 'x');
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  for (std::int64_t at = 0; at < bytes; at += static_cast<std::int64_t>(block.size())) {
    const auto count = std::min<std::int64_t>(bytes - at, static_cast<std::int64_t>(block.size()));
    if (::write(fd, block.data(), static_cast<std::size_t>(count)) != count) std::abort();
  }
  if (::fsync(fd) != 0) std::abort();
  ::close(fd);
}

// Waits until nothing is left to be written, so that no case pays for the one before it.
void settle() { ::sync(); }

void save_and_load(const std::filesystem::path& folder) {
  const auto model = make_model();
  const auto path = folder / "model.safetensors";
  std::int64_t bytes = 0;
  for (const auto& item : model) bytes += static_cast<std::int64_t>(item.value().nbytes());
  const double mb = static_cast<double>(bytes) / 1e6;

  settle();
  report("disk: write and fsync", mb / seconds([&] { write_plain(folder / "plain", bytes); }),
         "MB/s");
  std::filesystem::remove(folder / "plain");
  settle();
  report("save, with fsync", mb / seconds([&] { st::save_file(model, path); }), "MB/s");

  std::vector<char> from(256 << 20, 'x');
  std::vector<char> to(256 << 20, 'y');
  const double copy = seconds([&] { std::memcpy(to.data(), from.data(), from.size()); });
  report("memory: copy", static_cast<double>(from.size()) / 1e6 / copy, "MB/s");
  double sum = 0;
  const auto read_all = [&](const accelerate::StateDict& tensors) {
    for (const auto& item : tensors) {
      sum += item.value().view(torch::kInt16).sum().item<double>();
    }
  };
  report("memory: every byte read once", mb / seconds([&] { read_all(model); }), "MB/s");
  report("load, mapped, no byte touched", 1e6 * seconds([&] { (void)st::load_file(path); }), "us");
  report("load, mapped, every byte read once", mb / seconds([&] { read_all(st::load_file(path)); }),
         "MB/s");
  report("load into memory",
         mb / seconds([&] { (void)st::File::open(path, {.mapped = false}).get_tensors(); }),
         "MB/s");
  if (torch::cuda::is_available()) {
    const auto load = [&] {
      const auto tensors = st::load_file(path, torch::kCUDA);
      torch::cuda::synchronize();
    };
    load();  // the context, and pinned memory
    report("load to the GPU", mb / seconds(load), "MB/s");
  }
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
         1e3 * seconds([&] { (void)st::File::open(folder / "many.safetensors").keys(); }), "ms");
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
