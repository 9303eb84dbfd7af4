// A layer in 4 and in 8 bits against the same layer in float32 and bfloat16: one input, as when
// tokens are written, and many, as when a prompt is read. On the CPU, and on a GPU if there is one.
//
//     build/dev/bench/quantization [cpu|gpu]
#include <accelerate/accelerate.h>
#include <accelerate/quantization.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace {

using accelerate::quant::linear_4bit;
using Clock = std::chrono::steady_clock;
using FourBit = std::pair<torch::Tensor, accelerate::quant::QuantState>;

constexpr std::int64_t kSize = 4096;

/// The shortest of several calls. The weights are larger than caches.
double seconds(int times, const std::function<void()>& call) {
  double shortest = 1e9;
  for (int i = 0; i < times; ++i) {
    const auto start = Clock::now();
    call();
    shortest = std::min(shortest, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return shortest;
}

void report(const std::string& what, std::int64_t rows, double time, double bytes) {
  const auto name = what + ", " + std::to_string(rows) + (rows == 1 ? " row" : " rows");
  std::cout << name << '\t' << time * 1e3 << "\tms\n"
            << name << ", weights\t" << bytes / time / 1e9 << "\tGB/s\n";
}

void measure_cpu() {
  torch::manual_seed(0);
  const auto weight = torch::randn({kSize, kSize});
  constexpr double kValues = kSize * kSize;
  const auto nf4 = accelerate::quant::quantize_4bit(weight, {.quant_type = "nf4"});
  const auto twice =
      accelerate::quant::quantize_4bit(weight, {.compress_statistics = true, .quant_type = "nf4"});
  const auto int8 = accelerate::quant::int8_vectorwise_quant(weight);
  const auto bf16 = weight.to(torch::kBFloat16);
  for (const std::int64_t rows : {1, 4, 8, 16, 128}) {
    const auto x = torch::randn({rows, kSize});
    const auto half = x.to(torch::kBFloat16);
    report("float32", rows, seconds(9, [&] { torch::linear(x, weight); }), 4 * kValues);
    report("bfloat16", rows, seconds(9, [&] { torch::linear(half, bf16); }), 2 * kValues);
    report("nf4", rows,
           seconds(9, [&] { static_cast<void>(linear_4bit(x, nf4.first, nf4.second)); }),
           kValues / 2 + kValues / 16);
    report("nf4, double quantized", rows,
           seconds(9, [&] { static_cast<void>(linear_4bit(x, twice.first, twice.second)); }),
           kValues / 2 + kValues / 64);
    report("int8", rows,
           seconds(9, [&] { static_cast<void>(accelerate::quant::int8_linear(x, int8, {}, 6)); }),
           kValues);
  }
  report(
      "quantize to nf4", kSize,
      seconds(5,
              [&] {
                static_cast<void>(accelerate::quant::quantize_4bit(weight, {.quant_type = "nf4"}));
              }),
      4 * kValues);
  report(
      "values of nf4", kSize,
      seconds(
          5, [&] { static_cast<void>(accelerate::quant::dequantize_4bit(nf4.first, nf4.second)); }),
      kValues / 2);
}

// -- on a GPU -------------------------------------------------------------------------------------

/// What works with copy i of a weight.
using Call = std::function<torch::Tensor(std::size_t i, const torch::Tensor& x)>;

/// Seconds of one call, over copies of a weight that caches cannot hold.
struct Times {
  double recorded = 0;  // as a CUDA graph: without what a launch costs the host
  double plain = 0;     // launched by a loop
};

Times measure(accelerate::Accelerator& accelerator, std::size_t copies, const torch::Tensor& x,
              const Call& call) {
  const auto over_all = [&](torch::Tensor& given) {
    torch::Tensor last;
    for (std::size_t i = 0; i < copies; ++i) last = call(i, given);
    return last.flatten().narrow(0, 0, 1);
  };
  auto input = x;
  const auto waited = [](const auto& run) {
    return [&run] {
      static_cast<void>(run());
      torch::cuda::synchronize();
    };
  };
  auto step = accelerator.capture(over_all, {.warmup = 1});
  static_cast<void>(step(input));  // also compiles kernels
  static_cast<void>(step(input));
  torch::cuda::synchronize();
  const auto replay = [&] { return step(input); };
  const auto loop = [&] { return over_all(input); };
  const auto count = static_cast<double>(copies);
  return {.recorded = seconds(20, waited(replay)) / count,
          .plain = seconds(5, waited(loop)) / count};
}

Times report_gpu(accelerate::Accelerator& accelerator, const std::string& what, std::size_t copies,
                 const torch::Tensor& x, double bytes, const Call& call) {
  const auto times = measure(accelerator, copies, x, call);
  report(what, x.size(0), times.recorded, bytes);
  report(what + ", plain loop", x.size(0), times.plain, bytes);
  return times;
}

void report_ratio(const std::string& what, std::int64_t rows, double ratio) {
  std::cout << what << ", " << rows << (rows == 1 ? " row" : " rows") << '\t' << ratio
            << "\ttimes as fast as bfloat16" << std::endl;
}

/// `make` of different random weights.
template <class F>
auto copies_of(std::size_t count, std::int64_t outputs, std::int64_t inputs, const F& make) {
  const auto options = torch::dtype(torch::kBFloat16).device(torch::kCUDA);
  std::vector<decltype(make(torch::Tensor()))> all;
  for (std::size_t i = 0; i < count; ++i)
    all.push_back(make(torch::randn({outputs, inputs}, options)));
  return all;
}

/// Packed weights; returns the recorded times for one of `rows` each.
std::vector<double> measure_4bit(accelerate::Accelerator& accelerator, const std::string& name,
                                 const std::vector<torch::Tensor>& inputs, std::int64_t outputs,
                                 std::size_t copies, bool twice) {
  const auto width = inputs.front().size(1);
  const auto values = static_cast<double>(outputs * width);
  const auto packed_bytes = values / 2 + (twice ? values / 64 : values / 16);
  const auto all = copies_of(copies, outputs, width, [&](const torch::Tensor& weight) {
    return accelerate::quant::quantize_4bit(weight,
                                            {.compress_statistics = twice, .quant_type = "nf4"});
  });
  std::vector<double> times;
  for (const auto& x : inputs) {
    const Call product = [&](std::size_t i, const torch::Tensor& given) {
      return linear_4bit(given, all[i].first, all[i].second);
    };
    times.push_back(report_gpu(accelerator, name, copies, x, packed_bytes, product).recorded);
  }
  const Call expand = [&](std::size_t i, const torch::Tensor&) {
    return accelerate::quant::dequantize_4bit(all[i].first, all[i].second);
  };
  report_gpu(accelerator, name + ", values", copies, inputs.front(), packed_bytes + 2 * values,
             expand);
  return times;
}

void measure_shape(accelerate::Accelerator& accelerator, std::int64_t outputs, std::int64_t width) {
  const auto shape = "gpu " + std::to_string(outputs) + "x" + std::to_string(width) + " ";
  const auto values = static_cast<double>(outputs * width);
  const auto options = torch::dtype(torch::kBFloat16).device(torch::kCUDA);
  // 1 GiB of packed bytes.
  const auto copies = static_cast<std::size_t>(
      std::clamp<std::int64_t>((std::int64_t{2} << 30) / (outputs * width), 4, 64));
  std::vector<torch::Tensor> inputs;
  for (const std::int64_t rows : {1, 4, 8, 16})
    inputs.push_back(torch::randn({rows, width}, options));
  std::vector<double> bf16;
  {
    const auto all = copies_of(copies, outputs, width, [](torch::Tensor weight) { return weight; });
    for (const auto& x : inputs) {
      const Call product = [&](std::size_t i, const torch::Tensor& given) {
        return torch::linear(given, all[i]);
      };
      bf16.push_back(
          report_gpu(accelerator, shape + "bfloat16", copies, x, 2 * values, product).recorded);
    }
  }
  const auto compare = [&](const std::string& name, const std::vector<double>& times) {
    for (std::size_t i = 0; i < times.size(); ++i) {
      report_ratio(shape + name, inputs[i].size(0), bf16[i] / times[i]);
    }
  };
  compare("nf4", measure_4bit(accelerator, shape + "nf4", inputs, outputs, copies, false));
  compare("nf4, double quantized", measure_4bit(accelerator, shape + "nf4, double quantized",
                                                inputs, outputs, copies, true));
  const auto int8 = copies_of(copies, outputs, width, [](const torch::Tensor& weight) {
    return accelerate::quant::int8_vectorwise_quant(weight);
  });
  std::vector<double> times;
  for (const auto& x : inputs) {
    const Call product = [&](std::size_t i, const torch::Tensor& given) {
      return accelerate::quant::int8_linear(given, int8[i], {}, 6);
    };
    times.push_back(report_gpu(accelerator, shape + "int8", copies, x, values, product).recorded);
  }
  compare("int8", times);
}

void measure_gpu() {
  accelerate::Accelerator accelerator;
  torch::manual_seed(0);
  {
    const auto from = torch::rand({std::int64_t{1} << 28}, torch::kCUDA);
    auto to = torch::empty_like(from);
    const auto time = seconds(10, [&] {
      to.copy_(from);
      torch::cuda::synchronize();
    });
    std::cout << "gpu, copy of 1 GiB (read and written)\t" << 2 * 4.0 * (1 << 28) / time / 1e9
              << "\tGB/s\n";
    const auto quantize = seconds(5, [&] {
      static_cast<void>(accelerate::quant::quantize_4bit(from, {.quant_type = "nf4"}));
      torch::cuda::synchronize();
    });
    std::cout << "gpu, quantize 1 GiB of float32 to nf4\t" << 4.0 * (1 << 28) / quantize / 1e9
              << "\tGB/s\n";
  }
  measure_shape(accelerator, 4096, 4096);
  measure_shape(accelerator, 11008, 4096);
  measure_shape(accelerator, 4096, 11008);
  measure_shape(accelerator, 28672, 8192);
}

}  // namespace

int main(int argc, char** argv) {
  const torch::NoGradGuard no_grad;
  const std::string which = argc > 1 ? argv[1] : "";
  if (which != "gpu") measure_cpu();
  if (which != "cpu" && torch::cuda::is_available()) measure_gpu();
  return 0;
}
