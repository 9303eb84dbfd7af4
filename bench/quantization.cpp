// A layer in 4 and in 8 bits against the same layer in float32 and bfloat16: one input, as when
// tokens are written, and many, as when a prompt is read.
//
//     build/dev/bench/quantization
#include <accelerate/quantization.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <string>

namespace {

constexpr std::int64_t kSize = 4096;

/// The shortest of several calls. The weights are larger than caches.
double seconds(int times, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
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

}  // namespace

int main() {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  using accelerate::quant::linear_4bit;
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
  return 0;
}
