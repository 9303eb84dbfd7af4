#include <cmath>
#include <cstdint>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/value/path.h"
#include "core/json.h"
#include "core/python_text.h"
#include "core/sorted_entries.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

class Writer {
 public:
  explicit Writer(const JsonOptions& options) : options_(options) {}

  void write(const Value& value, const TreePath& path, int depth) {
    if (depth > kMaxValueDepth) {
      throw ArgumentError(str("The value is nested deeper than ", kMaxValueDepth, " levels."));
    }
    if (value.is_none()) {
      out_ += "null";
    } else if (value.is_bool()) {
      out_ += value.as_bool() ? "true" : "false";
    } else if (value.is_int()) {
      out_ += std::to_string(value.as_int());
    } else if (value.is_double()) {
      write_double(value.as_double());
    } else if (value.is_string()) {
      write_string(value.as_string());
    } else if (value.is_list() || value.is_tuple()) {
      write_list(value.items(), path, depth);
    } else if (value.is_dict()) {
      write_dict(value.as_dict(), path, depth);
    } else {
      const auto place = path.str();
      throw ArgumentError(
          str("JSON cannot hold the ", value.kind_name(), place.empty() ? "" : " at ", place, "."));
    }
  }

  [[nodiscard]] std::string take() { return std::move(out_); }

 private:
  void write_double(double number) {
    if (std::isnan(number)) {
      out_ += "NaN";
    } else if (std::isinf(number)) {
      out_ += number > 0 ? "Infinity" : "-Infinity";
    } else {
      out_ += python_repr(number);
    }
  }

  void write_list(std::span<const Value> items, const TreePath& path, int depth) {
    out_ += '[';
    for (std::size_t i = 0; i < items.size(); ++i) {
      begin_item(i == 0, depth + 1);
      write(items[i], path.item(static_cast<std::int64_t>(i)), depth + 1);
    }
    if (!items.empty()) new_line(depth);
    out_ += ']';
  }

  void write_dict(const Value::Dict& dict, const TreePath& path, int depth) {
    out_ += '{';
    bool first = true;
    for (const auto* entry : entries(dict, options_.sort_keys)) {
      begin_item(std::exchange(first, false), depth + 1);
      const auto key = key_text(entry->key());
      write_string(key);
      out_ += ": ";
      write(entry->value(), path.entry(key), depth + 1);
    }
    if (!dict.empty()) new_line(depth);
    out_ += '}';
  }

  static std::string key_text(const ValueKey& key) {
    if (key.is_bool()) return key.as_bool() ? "true" : "false";
    return key.to_string();
  }

  void begin_item(bool first, int depth) {
    if (!first) out_ += options_.indent ? "," : ", ";
    new_line(depth);
  }

  void new_line(int depth) {
    if (!options_.indent) return;
    out_ += '\n';
    out_.append(static_cast<std::size_t>(*options_.indent) * static_cast<std::size_t>(depth), ' ');
  }

  void write_string(std::string_view text) {
    out_ += '"';
    for (std::size_t at = 0; at < text.size();) {
      const auto point = next_code_point(text, at);
      if (!point.valid && options_.replace_invalid) {
        write_code_point({.value = 0xFFFD, .length = 3, .valid = true}, "\xEF\xBF\xBD");
      } else {
        write_code_point(point, text.substr(at, point.length));
      }
      at += point.length;
    }
    out_ += '"';
  }

  void write_code_point(const CodePoint& point, std::string_view bytes) {
    static constexpr std::string_view kSpecial = "\"\\\b\f\n\r\t";
    static constexpr std::string_view kLetters = "\"\\bfnrt";
    const char32_t c = point.value;
    if (const auto special = c < 0x80 ? kSpecial.find(static_cast<char>(c)) : kSpecial.npos;
        special != kSpecial.npos) {
      out_ += '\\';
      out_ += kLetters[special];
    } else if (c >= 0x20 && c < 0x7F) {
      out_ += static_cast<char>(c);
    } else if (point.valid && c >= 0x7F && !options_.ensure_ascii) {
      out_ += bytes;
    } else if (c >= 0x10000) {
      write_unit(0xD800 + ((c - 0x10000) >> 10));
      write_unit(0xDC00 + ((c - 0x10000) & 0x3FF));
    } else {
      write_unit(c);  // what is not UTF-8 comes out as Python's surrogate escapes
    }
  }

  void write_unit(std::uint32_t unit) {
    out_ += "\\u";
    append_hex(out_, unit, 4);
  }

  const JsonOptions& options_;
  std::string out_;
};

}  // namespace

std::string json_dumps(const Value& value, const JsonOptions& options) {
  Writer writer(options);
  writer.write(value, TreePath(), 0);
  return writer.take();
}

}  // namespace accelerate::detail::inline core
