// Any YAML is read as rules or refused with a ConfigError; rules end in time, with one tensor per
// name, or are refused with a ConfigError. What follows a zero byte are names, one a line.
#include <set>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/yaml.h"
#include "formats/key_mapping.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  const auto text = fuzz::text(data, size);
  const auto zero = text.find('\0');
  std::vector<std::string> names{"model.layers.0.attn.q.weight", "model.layers.0.attn.k.weight",
                                 "h.11.c_attn.bias", "lm_head.weight"};
  if (zero != text.npos) {
    std::set<std::string> lines;
    for (auto& line : detail::split(text.substr(zero + 1), '\n')) {
      if (!line.empty()) lines.insert(std::move(line));
    }
    names.assign(lines.begin(), lines.end());
  }
  try {
    const auto rules = detail::yaml_loads_unique(text.substr(0, zero), "rules");
    const auto mapped = detail::formats::map_keys(KeyMapping::from_value(rules), names,
                                                  {.steps = 100'000, .bytes = 100'000});
    std::set<std::string> made;
    for (const auto& [name, recipe] : mapped.tensors) {
      fuzz::check(!name.empty() && made.insert(name).second, "names are unique and not empty");
      fuzz::check(recipe != nullptr && recipe->steps <= 4096, "recipes are short");
    }
    (void)mapped.report.to_string();
  } catch (const ConfigError&) {
  }
  return 0;
}
