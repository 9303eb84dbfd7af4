#include "commands/memory_estimate.h"

#include <algorithm>
#include <limits>
#include <map>
#include <span>

#include "accelerate/errors.h"
#include "core/bytes.h"
#include "core/progress_line.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

void add(std::int64_t& sum, std::int64_t bytes) {
  if (!__builtin_add_overflow(sum, bytes, &sum)) return;
  throw ConfigError("The sizes of the model's tensors add up to more than 64 bits can hold.");
}

bool matches(std::span<const std::string> path, const std::vector<std::string>& pattern) {
  if (path.size() < pattern.size()) return false;
  const auto last = path.last(pattern.size());
  return std::ranges::equal(last, pattern, [](const std::string& part, const std::string& wanted) {
    return wanted == "*" || wanted == part;
  });
}

// The layer that a tensor belongs to; its own name if it is a tensor of the root.
std::string layer_of(const std::string& name,
                     const std::vector<std::vector<std::string>>& no_split) {
  const auto parts = split(name, '.');
  if (parts.size() == 1) return name;
  const std::span modules(parts.data(), parts.size() - 1);
  for (std::size_t length = 1; length < modules.size(); ++length) {
    const auto prefix = modules.first(length);
    const auto fits = [&](const auto& pattern) { return matches(prefix, pattern); };
    if (std::ranges::any_of(no_split, fits)) return join(prefix, ".");
  }
  return join(modules, ".");
}

// How much smaller than float32 a dtype is.
double divisor(const std::string& dtype) {
  static const std::map<std::string, double> kDivisors{
      {"float32", 1}, {"float16", 2}, {"int8", 4}, {"int4", 8}};
  return kDivisors.at(dtype);
}

// Python divides only where the size changes, and prints whole numbers without a decimal.
std::string shown(std::int64_t bytes, const std::string& dtype) {
  return dtype == "float32" ? convert_bytes(bytes)
                            : convert_bytes(static_cast<double>(bytes) / divisor(dtype));
}

std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(display_width(text));
}

std::string centred(const std::string& text, std::size_t width) {
  const std::size_t spare = width - width_of(text);
  const std::size_t left = spare / 2 + (spare & width & 1);
  return std::string(left, ' ') + text + std::string(spare - left, ' ');
}

std::string ruler(std::string_view left, std::string_view middle, std::string_view right,
                  const std::vector<std::size_t>& widths) {
  std::vector<std::string> lines;
  for (const auto width : widths) {
    std::string line;
    for (std::size_t i = 0; i < width; ++i) line += "─";
    lines.push_back(std::move(line));
  }
  return str(left, join(lines, middle), right, "\n");
}

std::vector<ShardedUsage> sharded_usage(const ModelSizes& sizes, const EstimateOptions& options,
                                        const std::optional<TransformerShape>& shape,
                                        std::optional<std::int64_t> sequence_length) {
  std::vector<ShardedUsage> rows;
  for (const auto& dtype : options.dtypes) {
    const auto usage = training_usage(sizes.total, dtype);
    if (!usage) continue;
    const auto add_row = [&](int stage, std::int64_t processes) {
      const auto share = [&](std::int64_t bytes, int from_stage) {
        return static_cast<double>(bytes) /
               (stage >= from_stage ? static_cast<double>(processes) : 1.0);
      };
      ShardedUsage row{.dtype = dtype,
                       .zero_stage = stage,
                       .num_processes = processes,
                       .parameters = share(usage->model, 3),
                       .gradients = share(usage->gradients, 2),
                       .optimizer = share(usage->optimizer, 1)};
      if (shape && sequence_length) {
        row.activations = activation_bytes(*shape, dtype, options.batch_size, *sequence_length);
      }
      rows.push_back(std::move(row));
    };
    // Without sharding every process holds the same, however many there are.
    add_row(0, 1);
    for (int stage = 1; stage <= 3; ++stage) {
      for (const auto processes : options.num_processes) {
        if (processes > 1) add_row(stage, processes);
      }
    }
  }
  return rows;
}

}  // namespace

ModelSizes measure(const ModelLayout& layout) {
  std::vector<std::vector<std::string>> no_split;
  for (const auto& pattern : layout.no_split) no_split.push_back(split(pattern, '.'));
  ModelSizes sizes;
  std::map<std::string, std::int64_t> layers;
  std::vector<std::string> order;
  for (const auto& tensor : layout.tensors) {
    add(sizes.total, tensor.bytes);
    if (tensor.trainable) add(sizes.parameters, tensor.elements);
    const auto [entry, fresh] = layers.try_emplace(layer_of(tensor.name, no_split), 0);
    if (fresh) order.push_back(entry->first);
    entry->second += tensor.bytes;
    sizes.largest_layer = std::max(sizes.largest_layer, entry->second);
  }
  for (const auto& name : order) {
    if (layers.at(name) == sizes.largest_layer) sizes.largest_names.push_back(name);
  }
  return sizes;
}

std::int64_t TrainingUsage::peak() const { return std::max({model, gradients, optimizer, step}); }

std::optional<TrainingUsage> training_usage(std::int64_t total, const std::string& dtype) {
  if (total > std::numeric_limits<std::int64_t>::max() / 4) {
    throw ConfigError("Training would take more bytes than 64 bits can count.");
  }
  if (dtype == "float32") {
    return TrainingUsage{
        .model = total, .gradients = total, .optimizer = 2 * total, .step = 4 * total};
  }
  if (dtype != "float16") return std::nullopt;
  // Weights stay in float32; gradients come with a half-precision copy of the weights.
  return TrainingUsage{
      .model = total, .gradients = total + total / 2, .optimizer = 2 * total, .step = 2 * total};
}

double activation_bytes(const TransformerShape& shape, const std::string& dtype,
                        std::int64_t batch_size, std::int64_t sequence_length) {
  const double element = dtype == "float32" ? 4 : 2;
  const auto tokens = static_cast<double>(batch_size) * static_cast<double>(sequence_length);
  const auto hidden = static_cast<double>(shape.hidden);
  // Elements per token: inputs of the norms, of q, k and v, of their product and of the projection;
  // masks of dropout have one byte.
  const double attention = hidden * (5 * element + 1) + hidden * 2 * element;
  // Scores: before and after dropout, and its mask.
  const double scores =
      static_cast<double>(shape.heads) * static_cast<double>(sequence_length) * (2 * element + 1);
  const double widths = shape.gated ? 3 : 2;
  const double feed_forward =
      hidden * (element + 1) + static_cast<double>(shape.intermediate) * widths * element;
  return static_cast<double>(shape.layers) * tokens * (attention + scores + feed_forward);
}

double ShardedUsage::total() const {
  return parameters + gradients + optimizer + activations.value_or(0);
}

MemoryEstimate estimate(const ModelLayout& layout, const EstimateOptions& options) {
  MemoryEstimate result{.options = options, .sizes = measure(layout), .sharded = {}};
  if (layout.shape) {
    const auto longest = std::min<std::int64_t>(layout.shape->positions, 2048);
    result.sequence_length = options.sequence_length.value_or(longest);
  }
  result.sharded = sharded_usage(result.sizes, options, layout.shape, result.sequence_length);
  return result;
}

std::string MemoryEstimate::text() const {
  std::vector<std::vector<std::string>> loading;
  for (const auto& dtype : options.dtypes) {
    const auto usage = training_usage(sizes.total, dtype);
    loading.push_back({dtype, shown(sizes.largest_layer, dtype), shown(sizes.total, dtype),
                       usage ? convert_bytes(usage->peak()) : "N/A"});
  }
  std::string out =
      box_table(str("Memory Usage for loading `", options.model, "`"),
                {"dtype", "Largest Layer", "Total Size", "Training using Adam"}, loading);
  if (sharded.empty()) return out;
  const bool known = sequence_length.has_value();
  std::vector<std::string> headers{"dtype",      "ZeRO stage", "Processes",
                                   "Parameters", "Gradients",  "Optimizer"};
  if (known) headers.emplace_back("Activations");
  headers.emplace_back("Total");
  std::vector<std::vector<std::string>> rows;
  for (const auto& row : sharded) {
    rows.push_back({row.dtype, str(row.zero_stage),
                    row.zero_stage == 0 ? "any" : str(row.num_processes),
                    convert_bytes(row.parameters), convert_bytes(row.gradients),
                    convert_bytes(row.optimizer)});
    if (known) rows.back().push_back(convert_bytes(row.activations.value_or(0)));
    rows.back().push_back(convert_bytes(row.total()));
  }
  out += box_table("Training with Adam, per process", headers, rows);
  out += known ? str("Activations: batch of ", options.batch_size, ", ", *sequence_length,
                     " tokens, no checkpointing, attention that keeps its scores.\n")
               : std::string(
                     "Activations are not included: there is no config.json of a known model.\n");
  return out;
}

Value::Dict MemoryEstimate::to_dict() const {
  Value::List dtypes;
  for (const auto& dtype : options.dtypes) {
    const auto usage = training_usage(sizes.total, dtype);
    Value training;
    if (usage) {
      training = Value::Dict{{"model", usage->model},
                             {"gradients", usage->gradients},
                             {"optimizer", usage->optimizer},
                             {"step", usage->step}};
    }
    dtypes.emplace_back(
        Value::Dict{{"dtype", dtype},
                    {"largest_layer", static_cast<double>(sizes.largest_layer) / divisor(dtype)},
                    {"total_size", static_cast<double>(sizes.total) / divisor(dtype)},
                    {"training", training}});
  }
  Value::List sharding;
  for (const auto& row : sharded) {
    sharding.emplace_back(Value::Dict{{"dtype", row.dtype},
                                      {"zero_stage", row.zero_stage},
                                      {"num_processes", row.num_processes},
                                      {"parameters", row.parameters},
                                      {"gradients", row.gradients},
                                      {"optimizer", row.optimizer},
                                      {"activations", row.activations},
                                      {"total", row.total()}});
  }
  return {{"model", options.model},
          {"parameters", sizes.parameters},
          {"total_size", sizes.total},
          {"largest_layer", sizes.largest_layer},
          {"largest_layer_names", sizes.largest_names},
          {"batch_size", options.batch_size},
          {"sequence_length", sequence_length},
          {"dtypes", Value(std::move(dtypes))},
          {"sharding", Value(std::move(sharding))}};
}

std::string box_table(const std::string& title, const std::vector<std::string>& headers,
                      const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& header : headers) widths.push_back(width_of(header));
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], width_of(row[i]));
    }
  }
  std::size_t inner = widths.size() - 1;  // the lines between columns
  for (const auto width : widths) inner += width;
  if (const auto needed = width_of(title); needed > inner) {
    widths.back() += needed - inner;
    inner = needed;
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::vector<std::string> padded;
    for (std::size_t i = 0; i < cells.size(); ++i) padded.push_back(centred(cells[i], widths[i]));
    return str("│", join(padded, "│"), "│\n");
  };
  std::string out = ruler("┌", "─", "┐", widths) + str("│", centred(title, inner), "│\n") +
                    ruler("├", "┬", "┤", widths) + line(headers) + ruler("├", "┼", "┤", widths);
  for (const auto& row : rows) out += line(row);
  return out + ruler("└", "┴", "┘", widths);
}

}  // namespace accelerate::detail::commands
