// What a data loader gives per second, on one thread and with workers; data_loader.py does the same
// work with Python's DataLoader prepared by Accelerate.
//
//     BENCH=data bench/run.sh starts both in turns and prints the ratios
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <thread>

#include "support.h"

namespace {

using accelerate::DataLoaderOptions;
using accelerate::FunctionDataset;
using accelerate::make_data_loader;

constexpr std::int64_t kRows = 400'000;
constexpr std::int64_t kImages = 50'000;
constexpr std::int64_t kImageBytes = 3 * 32 * 32;
constexpr std::int64_t kSequences = 50'000;
constexpr std::int64_t kRecords = 100'000;
constexpr std::int64_t kRecordBytes = 256;
constexpr std::int64_t kLargeRows = 131'072;  // of 4 KiB each
constexpr std::int64_t kLargeBatch = 4'096;

std::int64_t samples_of(const at::Tensor& batch) { return batch.size(0); }
template <class Batch>
std::int64_t samples_of(const Batch& batch) {
  return std::get<0>(batch).size(0);
}

/// Samples per second of one pass, of which there are `size`.
template <class Loader>
double rate(const Loader& loader, std::int64_t size) {
  std::int64_t seen = 0;
  const double time = bench::microseconds(1, [&] {
    for (auto& batch : loader) seen += samples_of(batch);
  });
  if (seen != size) throw std::logic_error("samples were lost");
  return 1e6 * static_cast<double>(size) / time;
}

/// The median of several passes, after one that is not counted: workers have been started then.
template <class Loader>
double settled_rate(const Loader& loader, std::int64_t size) {
  (void)rate(loader, size);
  std::vector<double> rates;
  for (int pass = 0; pass < 5; ++pass) rates.push_back(rate(loader, size));
  return bench::median(rates);
}

template <class Make>
auto prepared(const Make& make, std::int64_t batch_size, std::int64_t workers) {
  const DataLoaderOptions options{
      .batch_size = batch_size, .shuffle = true, .num_workers = workers};
  return accelerate::prepare_data_loader(make(options), {.put_on_device = true});
}

/// Reports thousands of samples per second for each number of workers, and returns the best.
template <class Make>
double measure(const std::string& name, std::int64_t size, std::int64_t batch_size,
               const Make& make) {
  double best = 0;
  for (const std::int64_t workers : {0, 2, 4}) {
    const double now = settled_rate(prepared(make, batch_size, workers), size) / 1e3;
    bench::report(name + ", " + std::to_string(workers) + " workers", now, "k/s");
    best = std::max(best, now);
  }
  bench::report(name + ", best", best, "k/s");
  return best;
}

void measure_rows() {
  const std::pair data{torch::rand({kRows, 32}), torch::arange(kRows)};
  const double best = measure("rows in memory", kRows, 256, [&](const DataLoaderOptions& options) {
    return make_data_loader(data, options);
  });
  bench::report("rows, against __getitems__, best", best, "k/s");
}

void measure_images() {
  const auto images = torch::randint(256, {kImages, 3, 32, 32}, torch::kUInt8);
  const auto labels = torch::randint(10, {kImages});
  const auto scale = torch::full({3, 1, 1}, 1 / (255 * 0.25));
  const auto shift = torch::full({3, 1, 1}, 0.5 / 0.25);

  const auto* classes = labels.const_data_ptr<std::int64_t>();
  const auto by_operations = [&](std::int64_t i) {
    return std::pair{images[i].to(torch::kFloat).mul_(scale).sub_(shift), classes[i]};
  };
  measure("images, tensor operations", kImages, 256, [&](const DataLoaderOptions& options) {
    return make_data_loader(FunctionDataset(kImages, by_operations), options);
  });

  const auto* pixels = images.const_data_ptr<std::uint8_t>();
  const auto by_loop = [pixels, classes](std::int64_t i) {
    auto image = torch::empty({3, 32, 32});
    auto* out = image.mutable_data_ptr<float>();
    const auto* in = pixels + i * kImageBytes;
    for (std::int64_t k = 0; k < kImageBytes; ++k) out[k] = in[k] * (4 / 255.F) - 2;
    return std::pair{std::move(image), classes[i]};
  };
  measure("images, a plain loop", kImages, 256, [&](const DataLoaderOptions& options) {
    return make_data_loader(FunctionDataset(kImages, by_loop), options);
  });
}

at::Tensor pad(const std::vector<std::vector<std::int64_t>>& sequences) {
  std::size_t longest = 0;
  for (const auto& sequence : sequences) longest = std::max(longest, sequence.size());
  auto batch = torch::empty({std::ssize(sequences), static_cast<std::int64_t>(longest)},
                            torch::kLong);  // [batch, longest]
  auto* out = batch.mutable_data_ptr<std::int64_t>();
  for (const auto& sequence : sequences) {
    const auto end = std::ranges::copy(sequence, out).out;
    out += longest;
    std::fill(end, out, 0);
  }
  return batch;
}

void measure_sequences() {
  std::vector<std::vector<std::int64_t>> sequences;
  for (std::int64_t i = 0; i < kSequences; ++i) sequences.emplace_back(16 + i * 7919 % 497, i);
  const auto shared = std::make_shared<std::vector<std::vector<std::int64_t>>>(sequences);
  measure("sequences padded", kSequences, 64,
          [&](const DataLoaderOptions& options) { return make_data_loader(shared, options, pad); });
}

void measure_records() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  const std::vector<char> record(kRecordBytes, 1);
  for (std::int64_t i = 0; i < kRecords; ++i) {
    std::fwrite(record.data(), 1, record.size(), file.get());
  }
  std::fflush(file.get());
  const auto read = [descriptor = fileno(file.get())](std::int64_t i) {
    auto values = torch::empty({kRecordBytes / 4});
    if (pread(descriptor, values.mutable_data_ptr(), kRecordBytes, i * kRecordBytes) !=
        kRecordBytes) {
      throw std::runtime_error("a record is not whole");
    }
    return values;
  };
  measure("records of a file", kRecords, 256, [&](const DataLoaderOptions& options) {
    return make_data_loader(FunctionDataset(kRecords, read), options);
  });
}

/// Samples per second if the rows were copied in order, by so many threads at once.
double copy_rate(const at::Tensor& rows, std::int64_t threads) {
  const auto row_bytes = static_cast<std::size_t>(rows.nbytes()) / kLargeRows;
  const auto* in = static_cast<const std::byte*>(rows.const_data_ptr());
  const auto share = kLargeRows / threads;
  std::vector<at::Tensor> buffers;
  for (std::int64_t i = 0; i < threads; ++i) buffers.push_back(torch::ones({kLargeBatch, 1024}));
  const auto copy = [&](std::int64_t thread) {
    for (std::int64_t row = thread * share; row < (thread + 1) * share; row += kLargeBatch) {
      std::memcpy(buffers[static_cast<std::size_t>(thread)].mutable_data_ptr(),
                  in + static_cast<std::size_t>(row) * row_bytes, kLargeBatch * row_bytes);
    }
  };
  const double time = bench::microseconds(1, [&] {
    std::vector<std::jthread> others;
    for (std::int64_t i = 1; i < threads; ++i) others.emplace_back(copy, i);
    copy(0);
  });
  return 1e6 * kLargeRows / time;
}

void measure_large_batches(const at::Tensor& rows) {
  const auto make = [&](const auto& options) { return make_data_loader(rows, options); };
  measure("rows of 4 KiB, batches of 16 MiB", kLargeRows, kLargeBatch, make);

  for (const std::int64_t threads : {1, 2}) {
    const auto loader = prepared(make, kLargeBatch, threads == 1 ? 0 : threads);
    std::vector<double> copies;
    std::vector<double> loads;
    for (int i = 0; i < 5; ++i) {
      // In turns, and each as it is once it goes on for a while.
      for (int pass = 0; pass < 3; ++pass) copies.push_back(copy_rate(rows, threads));
      for (int pass = 0; pass < 3; ++pass) loads.push_back(rate(loader, kLargeRows));
    }
    const auto name = std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    bench::report("memcpy by " + name, bench::median(copies) / 1e3, "k/s");
    bench::report("share of memcpy, " + name, 100 * bench::median(loads) / bench::median(copies),
                  "%");
  }
}

double resident_megabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

/// What workers hold when nobody takes their batches away quickly.
void measure_memory(const at::Tensor& rows) {
  const double before = resident_megabytes();
  double most = 0;
  const auto loader = prepared([&](const auto& options) { return make_data_loader(rows, options); },
                               kLargeBatch, 4);
  for ([[maybe_unused]] auto& batch : loader) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    most = std::max(most, resident_megabytes() - before);
  }
  bench::report("held with a slow consumer, 4 workers", most, "MB");
  bench::report("prefetch 2 x 4 workers x 16 MiB, and one in use", 9 * 16, "MB");
}

}  // namespace

int main() {
  const accelerate::PartialState state({.cpu = true});
  at::set_num_threads(1);
  measure_rows();
  measure_images();
  measure_sequences();
  measure_records();
  const auto rows = torch::rand({kLargeRows, 1024});
  measure_memory(rows);
  measure_large_batches(rows);
}
