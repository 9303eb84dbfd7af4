// interop_decoders FOLDER PLACE SPILL IDS TOKENS OUT: loads the model in FOLDER, and writes to OUT
// the scores of all IDS ("1,2,3") and the TOKENS tokens that follow them greedily. PLACE is
// "resident", or where the weights are while they are not used: "cpu" or "disk", in SPILL.
#include <accelerate/accelerate.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "examples/decoder_folder.h"
#include "examples/decoding.h"

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr << "usage: interop_decoders FOLDER PLACE SPILL IDS TOKENS OUT\n";
    return 2;
  }
  const std::vector<std::string> words(argv + 1, argv + argc);
  return accelerate::record([&] {
    const bool is_resident = words[1] == "resident";
    const auto model = examples::load_decoder(
        examples::read_decoder_folder(words[0]),
        {.device_map = accelerate::DeviceMap{{"", is_resident ? "cpu" : words[1]}},
         .offload_folder = words[2],
         .lazy = {.manage_on_cpu = !is_resident}});
    std::vector<std::int64_t> prompt;
    std::istringstream ids(words[3]);
    for (std::string id; std::getline(ids, id, ',');) prompt.push_back(std::stoll(id));

    const torch::NoGradGuard no_grad;
    examples::KvCache cache(model->config().num_hidden_layers, std::ssize(prompt));
    const auto logits = model(torch::tensor(prompt).unsqueeze(0), &cache, /*logits_to_keep=*/0);
    const auto tokens = examples::decode(model, prompt, {.tokens = std::stoll(words[4])});
    accelerate::torch_save(
        accelerate::Value::Dict{
            {"logits", logits}, {"tokens", torch::tensor(tokens)}, {"fills", model.stats().fills}},
        words[5]);
  });
}
