// Tokens after tokens: greedy, or drawn from the likely ones.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <accelerate/accelerate.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "decoder_folder.h"

namespace examples {

struct DecodingOptions {
  std::int64_t tokens = 32;
  /// 0: always the likeliest token. More than 1 makes unlikely tokens more likely.
  double temperature = 0;
  /// Draw from the fewest tokens that have this probability together.
  double top_p = 1;
  std::int64_t seed = 0;
  /// The last token is the first of these, if one comes.
  std::vector<std::int64_t> end_ids = {};
  /// Called after each token.
  std::function<void()> on_token = {};
};

/// Throws `ConfigError` for ids that are no tokens of the model, and for more tokens than it sees.
inline void check_prompt(const DecoderConfig& config, const std::vector<std::int64_t>& prompt,
                         std::int64_t tokens) {
  if (prompt.empty()) throw accelerate::ConfigError("The prompt is empty. Give at least one id.");
  for (const auto id : prompt) {
    if (id >= 0 && id < config.vocab_size) continue;
    throw accelerate::ConfigError("The prompt has the id " + std::to_string(id) +
                                  ". The ids of this model go from 0 to " +
                                  std::to_string(config.vocab_size - 1) + ".");
  }
  const auto wanted = static_cast<std::int64_t>(prompt.size()) + tokens;
  if (wanted > config.max_position_embeddings) {
    throw accelerate::ConfigError(
        "The prompt of " + std::to_string(prompt.size()) + " tokens and " + std::to_string(tokens) +
        " more do not fit: the context of this model has " +
        std::to_string(config.max_position_embeddings) + " tokens. Shorten one of them.");
  }
}

/// Until its end attention is computed without cuDNN, for which each length of the text is a new
/// shape: a plan for it takes longer than the rest of a token. Other kernels need none.
class [[nodiscard]] NoCudnnAttention {
 public:
  NoCudnnAttention() : was_on_(at::globalContext().userEnabledCuDNNSDP()) {
    at::globalContext().setSDPUseCuDNN(false);
  }
  ~NoCudnnAttention() { at::globalContext().setSDPUseCuDNN(was_on_); }
  NoCudnnAttention(const NoCudnnAttention&) = delete;
  NoCudnnAttention& operator=(const NoCudnnAttention&) = delete;

 private:
  bool was_on_;
};

/// One token by its scores, [vocab].
inline std::int64_t choose(const torch::Tensor& scores, const DecodingOptions& options,
                           const at::Generator& generator) {
  if (options.temperature == 0) return scores.argmax().item<std::int64_t>();
  const auto [likely, ids] =
      (scores.to(torch::kFloat) / options.temperature).softmax(0).sort(0, /*descending=*/true);
  const auto before = likely.cumsum(0) - likely;  // the first one always stays
  const auto drawn = likely.masked_fill(before >= options.top_p, 0)
                         .cpu()  // as the generator
                         .multinomial(1, /*replacement=*/false, generator);
  return ids[drawn.item<std::int64_t>()].item<std::int64_t>();
}

/// The tokens that the model writes behind `prompt`.
inline std::vector<std::int64_t> decode(const DispatchedDecoder& model,
                                        const std::vector<std::int64_t>& prompt,
                                        const DecodingOptions& options) {
  const auto& config = model->config();
  check_prompt(config, prompt, options.tokens);
  const torch::NoGradGuard no_grad;
  const NoCudnnAttention no_plans;
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(options.seed));
  KvCache cache(config.num_hidden_layers,
                static_cast<std::int64_t>(prompt.size()) + options.tokens);
  std::vector<std::int64_t> written;
  // Scores come back to where the ids are: of each token only its id comes to the host.
  const auto on_device = torch::TensorOptions(torch::kLong).device(model.main_device());
  auto ids = torch::tensor(prompt, on_device).unsqueeze(0);  // [1, time]
  while (static_cast<std::int64_t>(written.size()) < options.tokens) {
    const auto scores = model(ids, &cache, /*logits_to_keep=*/1);  // [1, 1, vocab]
    written.push_back(choose(scores[0][0], options, generator));
    if (options.on_token) options.on_token();
    if (std::ranges::find(options.end_ids, written.back()) != options.end_ids.end()) break;
    ids = torch::full({1, 1}, written.back(), on_device);
  }
  return written;
}

}  // namespace examples
