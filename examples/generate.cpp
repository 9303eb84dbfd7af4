// Writes on from a prompt with GPT-2 or a Llama, also one that is larger than the device. There is
// no tokenizer here: ids go in, ids come out.
//
//     build/dev/examples/generate --model Llama-3.2-1B --prompt_ids 128000,9906 --device_map auto
//         --max_memory 0=1GiB,cpu=8GiB --offload_folder spill --tokens 64
//
// The folder is what save_pretrained of transformers writes. Without --temperature the likeliest
// token is taken; with it tokens are drawn, by --seed, from the likely ones (--top_p).
//
// With --model tests/reference/decoders/llama --prompt_ids 3,1,4,1,5 --device_map cpu --tokens 8:
//
// Last line: "result: 8 tokens, N tokens per second, 0.0 MiB moved"
//
// The rate is that of the tokens after the second: the line before has the time to the first one.
//
// --quantize int8, nf4 or fp4 keeps the linear layers in 8 or 4 bits, and --offload cpu or disk
// brings all weights, as they are kept, when they are needed. --random tiny, 1b or 7b, in place of
// --model, is a Llama of that size with random weights, to measure with.
//
// Layers that are too wide for one process are cut over several by --tp, a device for each:
//
//     accelerate launch --num_processes 2 build/dev/examples/generate --tp 2 --device_map cpu ...
#include <ATen/DeviceAccelerator.h>
#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "decoder_folder.h"
#include "decoding.h"

namespace {

struct Options {
  std::string model;       // a folder
  std::string random;      // or a size
  std::string prompt_ids;  // "1,2,3"
  std::string device_map = "auto";
  std::string max_memory;  // "0=20GiB,cpu=60GiB"
  std::string offload_folder;
  std::string quantize;  // int8, nf4 or fp4
  std::string offload;   // cpu or disk
  std::int64_t tp = 1;   // processes
  examples::DecodingOptions decoding;
};

Options parse(int argc, char** argv) {
  Options options;
  examples::read_arguments(argc, argv,
                           {{"--model", options.model},
                            {"--random", options.random},
                            {"--prompt_ids", options.prompt_ids},
                            {"--device_map", options.device_map},
                            {"--max_memory", options.max_memory},
                            {"--offload_folder", options.offload_folder},
                            {"--quantize", options.quantize},
                            {"--offload", options.offload},
                            {"--tp", options.tp},
                            {"--tokens", options.decoding.tokens},
                            {"--temperature", options.decoding.temperature, /*least=*/0},
                            {"--top_p", options.decoding.top_p, /*least=*/0},
                            {"--seed", options.decoding.seed, /*least=*/0}});
  if (options.model.empty() == options.random.empty()) {
    throw accelerate::ConfigError(
        "--model needs the folder of a model; --random, in its place, the size of one.");
  }
  if (options.offload == "disk" ? options.offload_folder.empty()
                                : !options.offload.empty() && options.offload != "cpu") {
    throw accelerate::ConfigError("--offload is '" + options.offload +
                                  "'. Give cpu, or disk with an --offload_folder.");
  }
  if (const auto p = options.decoding.top_p; !(p > 0 && p <= 1)) {
    throw accelerate::ConfigError("--top_p is " + std::to_string(p) +
                                  ". It is a probability: give more than 0 and at most 1.");
  }
  return options;
}

/// The parts between commas; none of an empty text.
std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const auto comma = text.find(',');
    parts.emplace_back(text.substr(0, comma));
    text.remove_prefix(comma == text.npos ? text.size() : comma + 1);
  }
  return parts;
}

std::vector<std::int64_t> read_ids(const std::string& text) {
  std::vector<std::int64_t> ids;
  for (const auto& part : split(text)) {
    const auto* const end = part.data() + part.size();
    std::int64_t id = 0;
    if (const auto read = std::from_chars(part.data(), end, id); read.ptr != end || part.empty()) {
      throw accelerate::ConfigError("--prompt_ids has '" + part +
                                    "', which is no id. Give ids like this: 1,2,3");
    }
    ids.push_back(id);
  }
  return ids;
}

accelerate::MaxMemory read_max_memory(const std::string& text) {
  accelerate::MaxMemory budget;
  for (const auto& part : split(text)) {
    const auto equals = part.find('=');
    if (equals == part.npos) {
      throw accelerate::ConfigError(
          "--max_memory has '" + part +
          "', which is no budget. Give them like this: 0=20GiB,cpu=60GiB");
    }
    budget.set(part.substr(0, equals), part.substr(equals + 1));
  }
  return budget;
}

accelerate::LoadDispatchOptions placement(const Options& options) {
  accelerate::LoadDispatchOptions placement;
  if (options.device_map == "cpu") {
    placement.device_map = accelerate::DeviceMap{{"", "cpu"}};
  } else {
    placement.device_map = options.device_map;
  }
  if (!options.max_memory.empty()) placement.max_memory = read_max_memory(options.max_memory);
  if (!options.offload_folder.empty()) placement.offload_folder = options.offload_folder;
  placement.progress = true;
  return placement;
}

examples::DispatchedDecoder load(const Options& options, const examples::DecoderFolder& folder) {
  std::optional<accelerate::BnbQuantizationConfig> bits;
  if (!options.quantize.empty()) bits = examples::bits_of(options.quantize, folder.dtype);
  const auto model = options.random.empty()
                         ? examples::load_decoder(folder, placement(options), bits)
                         : examples::fill_decoder(folder, bits);
  if (options.offload.empty()) return model;
  const auto decoder = model.holder();
  const auto device = model.main_device();
  model.remove_hooks();
  if (options.offload == "cpu") {
    return accelerate::cpu_offload(
        decoder, {.execution_device = device, .preload_module_classes = examples::kDecoderBlocks});
  }
  return accelerate::disk_offload(
      decoder, options.offload_folder,
      {.execution_device = device, .preload_module_classes = examples::kDecoderBlocks});
}

/// Heads of attention and the width between two layers are cut, the vocabulary if it can be
/// divided.
accelerate::TpPlan tp_plan(const examples::Decoder& decoder, std::int64_t tp) {
  using accelerate::TpStyle;
  const auto& config = decoder.config();
  if (config.num_key_value_heads % tp != 0) {
    throw accelerate::ConfigError("--tp is " + std::to_string(tp) + ", but the model has " +
                                  std::to_string(config.num_key_value_heads) +
                                  " heads of keys and values, which it must divide.");
  }
  accelerate::TpPlan plan{{"blocks.*.attention.out", TpStyle::kRowwise},
                          {"blocks.*.attention.*", TpStyle::kColwise},
                          {"blocks.*.up", TpStyle::kColwise},
                          {"blocks.*.down", TpStyle::kRowwise}};
  if (decoder.named_modules().contains("blocks.0.gate")) {
    plan.push_back({"blocks.*.gate", TpStyle::kColwise});
  }
  if (config.vocab_size % tp == 0) {
    plan.push_back({"tokens", TpStyle::kVocab});
    plan.push_back({"head", TpStyle::kColwiseRep});
  }
  return plan;
}

/// Collective. Returns true on the process that writes the result.
bool cut(examples::Decoder& decoder, std::int64_t tp) {
  if (tp == 1) return true;
  const accelerate::PartialState state;
  const auto mesh = accelerate::ParallelismConfig{.tp_size = tp}.build_device_mesh(
      state.device().is_cpu() ? "cpu" : "cuda");
  accelerate::apply_tp_plan(decoder, tp_plan(decoder, tp), mesh);
  return state.is_main_process();
}

/// Of one `decode`. The first call reads the prompt, the second one may compile kernels.
class TokenTimes {
 public:
  void operator()() { ends_.push_back(Clock::now()); }
  [[nodiscard]] double first() const { return seconds(start_, ends_.front()); }
  /// After the second token, if there are more.
  [[nodiscard]] double rate() const {
    if (ends_.size() < 3) return static_cast<double>(ends_.size()) / seconds(start_, ends_.back());
    return static_cast<double>(ends_.size() - 2) / seconds(ends_[1], ends_.back());
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double seconds(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  }
  Clock::time_point start_ = Clock::now();
  std::vector<Clock::time_point> ends_;
};

double in_mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void run(const Options& options) {
  const auto folder = options.random.empty() ? examples::read_decoder_folder(options.model)
                                             : examples::random_llama(options.random);
  const auto prompt = read_ids(options.prompt_ids);
  // Loading may take a while: what is wrong is said before.
  examples::check_prompt(folder.config, prompt, options.decoding.tokens);
  const auto model = load(options, folder);
  if (options.tp > 1 && model.hf_device_map().size() > 1) {
    throw accelerate::ConfigError(
        "--tp cuts a model that is on one device. Use --device_map cpu, or more processes instead "
        "of --max_memory.");
  }
  const bool writes = cut(*model.operator->(), options.tp);
  for (const auto& [name, device] : model.hf_device_map()) {
    if (writes) std::cout << (name.empty() ? "all" : name) << ": " << device << '\n';
  }

  auto decoding = options.decoding;
  decoding.end_ids = folder.end_ids;
  TokenTimes times;
  decoding.on_token = [&times] { times(); };
  const auto written = examples::decode(model, prompt, decoding);
  if (!writes) return;

  std::cout << "ids:";
  for (const auto id : written) std::cout << ' ' << id;
  const auto stats = model.stats();
  std::cout << std::fixed << std::setprecision(1) << "\nweights: " << stats.fills
            << " groups were brought, " << stats.prefetch_hits << " of them ahead; at most "
            << in_mib(stats.peak_resident_bytes) << " MiB at once";
  if (const auto device = model.main_device(); !device.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto memory = at::accelerator::getDeviceStats(device.index()).allocated_bytes[kAll];
    std::cout << "\nmemory of the device: at most " << in_mib(memory.peak) << " MiB";
  }
  std::cout << "\nfirst token: " << 1e3 * times.first() << " ms\nresult: " << written.size()
            << " tokens, " << times.rate() << " tokens per second, " << in_mib(stats.bytes_read)
            << " MiB moved\n";
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] { run(parse(argc, argv)); });
}
