#include "data/index_reference.h"

#include <fstream>
#include <iomanip>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "support/reference_path.h"

namespace accelerate::test {

std::vector<GridLine> read_grid(const std::string& name, EvenColumn even) {
  std::ifstream file(reference_path("data/" + name));
  if (!file) throw std::runtime_error("cannot read the reference " + name);
  std::vector<GridLine> lines;
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text);
    GridLine line;
    auto& setting = line.setting;
    words >> setting.batch_size >> setting.num_processes >> setting.drop_last >>
        setting.split_batches;
    if (even == EvenColumn::kYes) words >> setting.even_batches;
    if (!words) throw std::runtime_error("a line of " + name + " is torn: " + text);
    for (std::string entry; words >> entry;) line.entries.push_back(entry);
    if (line.entries == std::vector<std::string>{"-"}) line.entries.clear();
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string to_text(std::int64_t length, const GridSetting& setting) {
  std::ostringstream out;
  out << "length " << length << ", batch_size " << setting.batch_size << ", num_processes "
      << setting.num_processes << (setting.drop_last ? ", drop_last" : "")
      << (setting.split_batches ? ", split_batches" : "")
      << (setting.even_batches ? ", even_batches" : "");
  return out.str();
}

std::string indices_text(const IndexBatch& indices) {
  std::string text;
  for (const auto index : indices) text += (text.empty() ? "" : ",") + std::to_string(index);
  return text;
}

std::string batches_text(const std::vector<IndexBatch>& batches) {
  std::string text;
  for (const auto& batch : batches) text += indices_text(batch) + ";";
  return text;
}

std::string fnv(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const unsigned char byte : text) value = (value ^ byte) * 0x100000001b3;
  std::ostringstream out;
  out << std::hex << std::setw(16) << std::setfill('0') << value;
  return out.str();
}

testing::AssertionResult is_entry(const std::string& grid, std::int64_t length,
                                  const GridSetting& setting, const std::string& text,
                                  const std::string& entry) {
  if (fnv(text) == entry) return testing::AssertionSuccess();
  const auto name = grid.substr(0, grid.find('.'));
  std::ostringstream arguments;
  arguments << name << " " << length << " " << setting.batch_size << " " << setting.num_processes
            << " " << setting.drop_last << " " << setting.split_batches;
  if (name == "shard") arguments << " " << setting.even_batches;
  return testing::AssertionFailure()
         << to_text(length, setting) << "\n  came:     " << text
         << "\n  expected: a text with the hash " << entry << ", which this command shows:\n"
         << "    python tests/reference/data/write_reference.py --show " << arguments.str();
}

IndexBatch iota(std::int64_t size) {
  IndexBatch numbers(static_cast<std::size_t>(size));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

}  // namespace accelerate::test
