// Tables of operators, with torch.profiler's columns and units.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <utility>

#include "accelerate/accelerator/profiler.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::join;
using detail::str;

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

std::string time_text(double microseconds) {
  if (microseconds >= 1e6) return fixed(microseconds / 1e6, 3) + "s";
  if (microseconds >= 1e3) return fixed(microseconds / 1e3, 3) + "ms";
  return fixed(microseconds, 3) + "us";
}

std::string memory_text(std::int64_t bytes) {
  constexpr std::array kUnits{std::pair{30, " GB"}, std::pair{20, " MB"}, std::pair{10, " KB"}};
  for (const auto& [shift, unit] : kUnits) {
    const auto size = std::int64_t{1} << shift;
    if (std::abs(bytes) >= size) {
      return fixed(static_cast<double>(bytes) / static_cast<double>(size), 2) + unit;
    }
  }
  return str(bytes, " B");
}

std::string share_text(double part, double whole) {
  return whole > 0 ? fixed(100 * part / whole, 2) + "%" : "NaN";
}

std::string shapes_text(const std::vector<std::vector<std::int64_t>>& shapes) {
  std::vector<std::string> each;
  for (const auto& shape : shapes) each.push_back(str("[", join(shape), "]"));
  return str("[", join(each), "]");
}

/// A text of at most `width` columns.
std::string cut(std::string text, std::int64_t width) {
  const auto length = static_cast<std::size_t>(std::max<std::int64_t>(width, 4));
  if (text.size() <= length) return text;
  text.resize(length - 3);
  return text + "...";
}

/// Columns of text: the first and the last ones begin at the left, numbers end at the right.
class Table {
 public:
  using Cell = std::function<std::string(const KeyAverage&)>;

  void add(std::string title, Cell cell, bool left = false) {
    columns_.push_back({std::move(title), std::move(cell), left});
  }
  [[nodiscard]] std::string text(const std::vector<const KeyAverage*>& rows) const {
    std::vector<std::vector<std::string>> cells;
    std::vector<std::size_t> widths;
    for (const auto& column : columns_) {
      auto& each = cells.emplace_back();
      auto& width = widths.emplace_back(column.title.size());
      for (const auto* row : rows) {
        width = std::max(width, each.emplace_back(column.cell(*row)).size());
      }
    }
    const auto line = [&](const auto& cell_of) {
      std::string result;
      for (std::size_t i = 0; i < columns_.size(); ++i) {
        const std::string cell = cell_of(i);
        const std::string blanks(widths[i] - cell.size(), ' ');
        result += i > 0 ? "  " : "";
        result += columns_[i].left ? cell + blanks : blanks + cell;
      }
      result.erase(result.find_last_not_of(' ') + 1);
      return result + "\n";
    };
    const auto rule = line([&](std::size_t i) { return std::string(widths[i], '-'); });
    auto result = rule + line([&](std::size_t i) { return columns_[i].title; }) + rule;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      result += line([&](std::size_t i) { return cells[i][r]; });
    }
    return result + rule;
  }

 private:
  struct Column {
    std::string title;
    Cell cell;
    bool left;
  };
  std::vector<Column> columns_;
};

using Quantity = double (*)(const KeyAverage&);

template <auto member>
double quantity(const KeyAverage& row) {
  return static_cast<double>(row.*member);
}

double mean(double total, std::int64_t count) {
  return count > 0 ? total / static_cast<double>(count) : 0;
}

constexpr auto kQuantities = std::to_array<std::pair<std::string_view, Quantity>>({
    {"cpu_time_total", quantity<&KeyAverage::cpu_time_total>},
    {"self_cpu_time_total", quantity<&KeyAverage::self_cpu_time_total>},
    {"cpu_time", [](const KeyAverage& row) { return mean(row.cpu_time_total, row.count); }},
    {"device_time_total", quantity<&KeyAverage::device_time_total>},
    {"self_device_time_total", quantity<&KeyAverage::self_device_time_total>},
    {"device_time", [](const KeyAverage& row) { return mean(row.device_time_total, row.count); }},
    {"cpu_memory_usage", quantity<&KeyAverage::cpu_memory_usage>},
    {"self_cpu_memory_usage", quantity<&KeyAverage::self_cpu_memory_usage>},
    {"device_memory_usage", quantity<&KeyAverage::device_memory_usage>},
    {"self_device_memory_usage", quantity<&KeyAverage::self_device_memory_usage>},
    {"flops", quantity<&KeyAverage::flops>},
    {"count", quantity<&KeyAverage::count>},
});

Quantity quantity_of(const std::string& sort_by) {
  auto wanted = sort_by;
  for (const std::string_view device : {"cuda", "xpu"}) {
    if (const auto at = wanted.find(device); at != std::string::npos) {
      wanted.replace(at, device.size(), "device");
    }
  }
  std::vector<std::string> choices;
  for (const auto& [name, quantity] : kQuantities) {
    if (name == wanted) return quantity;
    choices.emplace_back(name);
  }
  throw ArgumentError(str("sort_by is '", sort_by, "', which is no column of a profile.",
                          detail::did_you_mean(wanted, choices), " Choose one of: ", join(choices),
                          " (cuda or xpu may stand for device)."));
}

/// The unit of floating-point operations in which the smallest row is at least 1.
std::pair<double, std::string> flops_unit(const std::vector<KeyAverage>& rows) {
  std::int64_t smallest = 0;
  for (const auto& row : rows) {
    if (row.flops > 0 && (smallest == 0 || row.flops < smallest)) smallest = row.flops;
  }
  constexpr std::array kNames{"", "FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"};
  std::size_t unit = smallest > 0 ? 1 : 0;
  double scale = 1;
  for (; static_cast<double>(smallest) / scale >= 1000 && unit + 1 < kNames.size(); ++unit) {
    scale *= 1000;
  }
  return {scale, kNames[unit]};
}

std::string collectives_table(const std::vector<CollectiveAverage>& collectives) {
  std::vector<KeyAverage> keys;
  std::vector<const KeyAverage*> rows;
  for (const auto& one : collectives) {
    keys.push_back({.key = one.key,
                    .count = one.count,
                    .cpu_time_total = one.time_total,
                    .cpu_memory_usage = one.bytes});
  }
  for (const auto& key : keys) rows.push_back(&key);
  Table table;
  table.add("Collective", [](const auto& row) { return row.key; }, /*left=*/true);
  table.add("Bytes", [](const auto& row) { return memory_text(row.cpu_memory_usage); });
  table.add("Time total", [](const auto& row) { return time_text(row.cpu_time_total); });
  table.add("Time avg",
            [](const auto& row) { return time_text(mean(row.cpu_time_total, row.count)); });
  table.add("# of Calls", [](const auto& row) { return str(row.count); });
  return table.text(rows);
}

}  // namespace

const KeyAverage* KeyAverages::find(std::string_view key) const {
  const auto found = std::ranges::find(rows_, key, &KeyAverage::key);
  return found == rows_.end() ? nullptr : &*found;
}

double KeyAverages::self_cpu_time_total() const {
  double sum = 0;
  for (const auto& row : rows_) sum += row.self_cpu_time_total;
  return sum;
}

std::string KeyAverages::table(const ProfileTableOptions& options) const {
  std::vector<const KeyAverage*> rows;
  for (const auto& row : rows_) rows.push_back(&row);
  if (!options.sort_by.empty()) {
    const auto key = quantity_of(options.sort_by);
    std::ranges::stable_sort(rows, std::greater(), [&](const auto* row) { return key(*row); });
  }
  if (options.row_limit >= 0) {
    rows.resize(std::min(rows.size(), static_cast<std::size_t>(options.row_limit)));
  }
  const double cpu = self_cpu_time_total();
  double device = 0;
  for (const auto& row : rows_) device += row.on_device ? row.self_device_time_total : 0;
  const bool any_shape =
      std::ranges::any_of(rows_, [](const auto& row) { return !row.input_shapes.empty(); });
  const auto [scale, unit] = flops_unit(rows_);

  Table table;
  table.add(
      "Name", [&](const auto& row) { return cut(row.key, options.max_name_column_width); },
      /*left=*/true);
  table.add("Self CPU %",
            [cpu](const auto& row) { return share_text(row.self_cpu_time_total, cpu); });
  table.add("Self CPU", [](const auto& row) { return time_text(row.self_cpu_time_total); });
  table.add("CPU total %", [cpu](const auto& row) { return share_text(row.cpu_time_total, cpu); });
  table.add("CPU total", [](const auto& row) { return time_text(row.cpu_time_total); });
  table.add("CPU time avg",
            [](const auto& row) { return time_text(mean(row.cpu_time_total, row.count)); });
  if (device > 0) {
    table.add(str("Self ", device_),
              [](const auto& row) { return time_text(row.self_device_time_total); });
    table.add(str("Self ", device_, " %"),
              [device](const auto& row) { return share_text(row.self_device_time_total, device); });
    table.add(str(device_, " total"),
              [](const auto& row) { return time_text(row.device_time_total); });
    table.add(str(device_, " time avg"),
              [](const auto& row) { return time_text(mean(row.device_time_total, row.count)); });
  }
  if (with_memory_) {
    table.add("CPU Mem", [](const auto& row) { return memory_text(row.cpu_memory_usage); });
    table.add("Self CPU Mem",
              [](const auto& row) { return memory_text(row.self_cpu_memory_usage); });
  }
  if (with_memory_ && std::ranges::any_of(rows_, [](const auto& row) {
        return row.self_device_memory_usage > 0;
      })) {
    table.add(str(device_, " Mem"),
              [](const auto& row) { return memory_text(row.device_memory_usage); });
    table.add(str("Self ", device_, " Mem"),
              [](const auto& row) { return memory_text(row.self_device_memory_usage); });
  }
  table.add("# of Calls", [](const auto& row) { return str(row.count); });
  if (!unit.empty()) {
    table.add(str("Total ", unit), [scale = scale](const auto& row) {
      return row.flops > 0 ? fixed(static_cast<double>(row.flops) / scale, 3) : "--";
    });
  }
  if (any_shape) {
    table.add(
        "Input Shapes",
        [&](const auto& row) {
          return cut(shapes_text(row.input_shapes), options.max_shapes_column_width);
        },
        /*left=*/true);
  }
  auto text = table.text(rows);
  text += str("Self CPU time total: ", time_text(cpu), "\n");
  if (device > 0) text += str("Self ", device_, " time total: ", time_text(device), "\n");
  if (!collectives_.empty()) text += str("\n", collectives_table(collectives_));
  return text;
}

}  // namespace accelerate
