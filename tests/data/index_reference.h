// tests/data/index_reference.h - the grids of indices that Python wrote, see
// tests/reference/data/write_reference.py.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/data/batch_samplers.h"

namespace accelerate::test {

struct GridSetting {
  std::int64_t batch_size = 1;
  int num_processes = 1;
  bool drop_last = false;
  bool split_batches = false;
  bool even_batches = true;
};

/// What Python did with one setting: an entry for each length from 0 on, "-" for an exception. A
/// setting that it never accepts has none.
struct GridLine {
  GridSetting setting;
  std::vector<std::string> entries;
};

/// The lines of a file in tests/reference/data, which has the column even_batches or not.
enum class EvenColumn : std::uint8_t { kNo, kYes };
[[nodiscard]] std::vector<GridLine> read_grid(const std::string& name, EvenColumn even);

/// For messages: "length 7, batch_size 2, num_processes 3, split_batches".
[[nodiscard]] std::string to_text(std::int64_t length, const GridSetting& setting);

/// "0,1;2,3;": the batches of one process as the hashed texts have them.
[[nodiscard]] std::string batches_text(const std::vector<IndexBatch>& batches);
/// "0,1".
[[nodiscard]] std::string indices_text(const IndexBatch& indices);
/// FNV-1a, 64 bits, as 16 digits.
[[nodiscard]] std::string fnv(std::string_view text);

/// Whether `entry` is the hash of `text`. Otherwise the message has the text, and the command that
/// shows Python's text of this case of `grid`, e.g. "shard.txt".
[[nodiscard]] testing::AssertionResult is_entry(const std::string& grid, std::int64_t length,
                                                const GridSetting& setting, const std::string& text,
                                                const std::string& entry);

/// 0, 1, ..., size - 1.
[[nodiscard]] IndexBatch iota(std::int64_t size);

}  // namespace accelerate::test
