// Slurm's compressed lists: "n[1-3,07],gpu-a" of hosts, "2(x3),1" of counts.
#include <limits>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"
#include "core/world.h"

namespace accelerate::detail::inline core {
namespace {

// More hosts than any cluster has: a typing error must not fill the memory.
constexpr std::size_t kMaxHosts = 1U << 20U;

[[noreturn]] void malformed(std::string_view hostlist, std::string_view why) {
  throw ConfigError(str("'", hostlist, "' is not a list of hosts as Slurm writes them: ", why,
                        ". Expected is something like n[1-3,07],gpu-a."));
}

// "07" counts with two digits: 07, 08, ..., 10.
std::string padded(std::uint64_t value, std::size_t width) {
  std::string text = std::to_string(value);
  if (text.size() < width) text.insert(0, width - text.size(), '0');
  return text;
}

// What stands in brackets: "1-3,07" becomes 1, 2, 3, 07.
std::vector<std::string> expand_ranges(std::string_view ranges, std::string_view hostlist) {
  std::vector<std::string> result;
  for (const std::string& range : split(ranges, ',')) {
    const auto dash = range.find('-');
    const std::string low_text = range.substr(0, dash);
    const auto low = parse_number<std::uint64_t>(low_text);
    const auto high =
        dash == std::string::npos ? low : parse_number<std::uint64_t>(range.substr(dash + 1));
    if (!low || !high) malformed(hostlist, str("'", range, "' is neither a number nor a range"));
    if (*high < *low) malformed(hostlist, str("the range '", range, "' runs backwards"));
    if (*high - *low >= kMaxHosts - result.size()) malformed(hostlist, "it has too many hosts");
    for (std::uint64_t n = *low; n <= *high; ++n) result.push_back(padded(n, low_text.size()));
  }
  return result;
}

// One element between commas, with any number of brackets: "rack[1-2]n[01-03]".
std::vector<std::string> expand_element(std::string_view element, std::string_view hostlist) {
  std::vector<std::string> names{""};
  while (!element.empty()) {
    const auto open = element.find_first_of("[]");
    for (auto& name : names) name += element.substr(0, open);
    if (open == std::string_view::npos) break;
    const auto close = element.find(']', open);
    if (element[open] == ']' || close == std::string_view::npos)
      malformed(hostlist, "brackets do not pair");
    const auto numbers = expand_ranges(element.substr(open + 1, close - open - 1), hostlist);
    if (names.size() * numbers.size() > kMaxHosts) malformed(hostlist, "it has too many hosts");
    std::vector<std::string> longer;
    longer.reserve(names.size() * numbers.size());
    for (const auto& name : names) {
      for (const auto& number : numbers) longer.push_back(name + number);
    }
    names = std::move(longer);
    element.remove_prefix(close + 1);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_hostlist(std::string_view hostlist) {
  std::vector<std::string> hosts;
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= hostlist.size(); ++i) {
    if (i < hostlist.size()) {
      depth += hostlist[i] == '[' ? 1 : hostlist[i] == ']' ? -1 : 0;
      if (hostlist[i] != ',' || depth > 0) continue;
    }
    const auto element = trim(hostlist.substr(begin, i - begin));
    if (element.empty()) malformed(hostlist, "a name is empty");
    for (auto& host : expand_element(element, hostlist)) hosts.push_back(std::move(host));
    if (hosts.size() > kMaxHosts) malformed(hostlist, "it has too many hosts");
    begin = i + 1;
  }
  return hosts;
}

std::optional<int> tasks_on_node(std::string_view counts, int node) {
  std::uint64_t passed = 0;
  for (const std::string& part : split(counts, ',')) {
    const auto open = part.find("(x");
    const auto count = parse_number<std::uint64_t>(part.substr(0, open));
    std::optional<std::uint64_t> times = 1;
    if (open != std::string::npos) {
      if (!part.ends_with(')')) return std::nullopt;
      times = parse_number<std::uint64_t>(part.substr(open + 2, part.size() - open - 3));
    }
    if (!count || !times || *count > std::numeric_limits<int>::max()) return std::nullopt;
    passed += *times;
    if (static_cast<std::uint64_t>(node) < passed) return static_cast<int>(*count);
  }
  return std::nullopt;
}

std::optional<std::string> node_addr_from(std::string_view scontrol_output) {
  constexpr std::string_view kKey = "NodeAddr=";
  for (auto found = scontrol_output.find(kKey); found != std::string_view::npos;
       found = scontrol_output.find(kKey, found + 1)) {
    if (found != 0 && scontrol_output[found - 1] != ' ' && scontrol_output[found - 1] != '\n')
      continue;
    const auto rest = scontrol_output.substr(found + kKey.size());
    const auto value = rest.substr(0, rest.find_first_of(" \t\r\n"));
    if (value.empty() || value == "(null)") return std::nullopt;
    return std::string(value);
  }
  return std::nullopt;
}

}  // namespace accelerate::detail::inline core
