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
#include <accelerate/accelerate.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "decoder_folder.h"
#include "decoding.h"

namespace {

struct Options {
  std::string model;       // a folder
  std::string prompt_ids;  // "1,2,3"
  std::string device_map = "auto";
  std::string max_memory;  // "0=20GiB,cpu=60GiB"
  std::string offload_folder;
  examples::DecodingOptions decoding;
};

Options parse(int argc, char** argv) {
  Options options;
  examples::read_arguments(argc, argv,
                           {{"--model", options.model},
                            {"--prompt_ids", options.prompt_ids},
                            {"--device_map", options.device_map},
                            {"--max_memory", options.max_memory},
                            {"--offload_folder", options.offload_folder},
                            {"--tokens", options.decoding.tokens},
                            {"--temperature", options.decoding.temperature, /*least=*/0},
                            {"--top_p", options.decoding.top_p, /*least=*/0},
                            {"--seed", options.decoding.seed, /*least=*/0}});
  if (options.model.empty()) throw accelerate::ConfigError("--model needs the folder of a model.");
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

double in_mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void run(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto folder = examples::read_decoder_folder(options.model);
  const auto prompt = read_ids(options.prompt_ids);
  // Loading may take a while: what is wrong is said before.
  examples::check_prompt(folder.config, prompt, options.decoding.tokens);
  const auto model = examples::load_decoder(folder, placement(options));
  for (const auto& [name, device] : model.hf_device_map()) {
    std::cout << (name.empty() ? "all" : name) << ": " << device << '\n';
  }

  const auto start = Clock::now();
  auto decoding = options.decoding;
  decoding.end_ids = folder.end_ids;
  const auto written = examples::decode(model, prompt, decoding);
  const std::chrono::duration<double> seconds = Clock::now() - start;

  std::cout << "ids:";
  for (const auto id : written) std::cout << ' ' << id;
  const auto stats = model.stats();
  std::cout << std::fixed << std::setprecision(1) << "\nweights: " << stats.fills
            << " groups were brought, " << stats.prefetch_hits << " of them ahead; at most "
            << in_mib(stats.peak_resident_bytes) << " MiB at once"
            << "\nresult: " << written.size() << " tokens, "
            << static_cast<double>(written.size()) / seconds.count() << " tokens per second, "
            << in_mib(stats.bytes_read) << " MiB moved\n";
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] { run(parse(argc, argv)); });
}
