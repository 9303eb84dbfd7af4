// The block structure is ours, because PyYAML and libyaml disagree on which keys stand behind a
// '?'; the quotes and escapes of strings are libyaml's.
#include <yaml.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <span>
#include <utility>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/sorted_entries.h"
#include "core/text.h"
#include "core/yaml.h"
#include "core/yaml_scalar.h"

namespace accelerate::detail::inline core {
namespace {

constexpr int kIndent = 2;

// PyYAML writes longer keys behind a '?'. The tag counts there, though it is not written.
constexpr std::size_t kLongestSimpleKey = 128;
constexpr std::size_t kTagLength = 5;  // !!str, !!int

bool is_simple_key(std::string_view text) {
  const auto characters = std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  const bool multiline = has("\n") || has("\xC2\x85") || has("\xE2\x80\xA8") || has("\xE2\x80\xA9");
  return characters > 0 && static_cast<std::size_t>(characters) + kTagLength < kLongestSimpleKey &&
         !multiline;
}

// A document of one string, for its quotes and escapes.
class StringEmitter {
 public:
  StringEmitter() {
    if (yaml_emitter_initialize(&emitter_) == 0) throw std::bad_alloc();
    yaml_emitter_set_width(&emitter_, -1);
    yaml_emitter_set_output(
        &emitter_,
        [](void* out, unsigned char* data, std::size_t size) {
          static_cast<std::string*>(out)->append(reinterpret_cast<const char*>(data), size);
          return 1;
        },
        &out_);
  }
  ~StringEmitter() { yaml_emitter_delete(&emitter_); }
  StringEmitter(const StringEmitter&) = delete;
  StringEmitter& operator=(const StringEmitter&) = delete;

  /// The string as it stands in a file; its further lines begin with `kIndent` blanks.
  std::string run(const std::string& text) {
    const int plain = resolve_yaml(text) == YamlTag::kString ? 1 : 0;
    yaml_event_t event;
    emit(event, yaml_stream_start_event_initialize(&event, YAML_UTF8_ENCODING));
    emit(event, yaml_document_start_event_initialize(&event, nullptr, nullptr, nullptr, 1));
    emit(event, yaml_scalar_event_initialize(
                    &event, nullptr, nullptr, reinterpret_cast<const yaml_char_t*>(text.data()),
                    static_cast<int>(text.size()), plain, 1, YAML_ANY_SCALAR_STYLE));
    emit(event, yaml_document_end_event_initialize(&event, 1));
    yaml_emitter_flush(&emitter_);
    return out_.substr(0, out_.find_last_not_of('\n') + 1);
  }

 private:
  void emit(yaml_event_t& event, int made) {
    if (made == 0 || yaml_emitter_emit(&emitter_, &event) == 0) {
      throw ArgumentError("YAML cannot hold a text that is not UTF-8.");
    }
  }

  std::string out_;
  yaml_emitter_t emitter_{};
};

class Writer {
 public:
  std::string document(const Value& value) {
    if (is_filled(value)) {
      write_collection(value, 0, /*first_in_line=*/false, 0);
    } else {
      const bool plain = write_scalar(value, kIndent);
      out_ += '\n';
      if (plain) out_ += "...\n";
    }
    return std::move(out_);
  }

 private:
  static bool is_filled(const Value& value) {
    if (value.is_dict()) return !value.as_dict().empty();
    return (value.is_list() || value.is_tuple()) && !value.items().empty();
  }

  void indent(int columns) { out_.append(static_cast<std::size_t>(columns), ' '); }

  // `first_in_line`: the first entry stands behind "- " in the same line.
  void write_collection(const Value& value, int column, bool first_in_line, int depth) {
    if (depth > kMaxValueDepth) {
      throw ArgumentError(str("The value is nested deeper than ", kMaxValueDepth, " levels."));
    }
    if (value.is_dict()) return write_mapping(value.as_dict(), column, first_in_line, depth);
    for (const auto& item : value.items()) {
      if (!std::exchange(first_in_line, false)) indent(column);
      out_ += "- ";
      write_inline(item, column, depth);
    }
  }

  void write_mapping(const Value::Dict& dict, int column, bool first_in_line, int depth) {
    for (const auto* entry : entries(dict, /*sorted=*/true)) {
      if (!std::exchange(first_in_line, false)) indent(column);
      if (write_key(entry->key(), column)) {
        out_ += ':';
        write_mapping_value(entry->value(), column, depth);
      } else {
        out_ += '\n';
        indent(column);
        out_ += ": ";
        write_inline(entry->value(), column, depth);
      }
    }
  }

  // False: the key was written behind a '?', and its value stands behind ':' in a line of its own.
  bool write_key(const ValueKey& key, int column) {
    if (!key.is_string()) {
      write_scalar(key.value(), column + kIndent);
      return true;
    }
    const bool simple = is_simple_key(key.as_string());
    if (!simple) out_ += "? ";
    write_string(key.as_string(), column + kIndent);
    return simple;
  }

  void write_mapping_value(const Value& value, int column, int depth) {
    if (is_filled(value)) {
      out_ += '\n';
      write_collection(value, value.is_dict() ? column + kIndent : column, /*first_in_line=*/false,
                       depth + 1);
    } else {
      out_ += ' ';
      write_scalar(value, column + kIndent);
      out_ += '\n';
    }
  }

  // Something behind "- " or ": ", whose own lines go two blanks further in.
  void write_inline(const Value& value, int column, int depth) {
    if (is_filled(value)) {
      write_collection(value, column + kIndent, /*first_in_line=*/true, depth + 1);
    } else {
      write_scalar(value, column + kIndent);
      out_ += '\n';
    }
  }

  // Also of empty lists and dicts. Whether it was written plain.
  bool write_scalar(const Value& value, int column) {
    if (value.is_string()) return write_string(value.as_string(), column);
    if (value.is_none()) {
      out_ += "null";
    } else if (value.is_bool()) {
      out_ += value.as_bool() ? "true" : "false";
    } else if (value.is_int()) {
      out_ += std::to_string(value.as_int());
    } else if (value.is_double()) {
      out_ += float_text(value.as_double());
    } else if (value.is_list() || value.is_tuple() || value.is_dict()) {
      out_ += value.is_dict() ? "{}" : "[]";
      return false;
    } else {
      throw ArgumentError(str("YAML cannot hold a value of kind ", value.kind_name(), "."));
    }
    return true;
  }

  static std::string float_text(double number) {
    if (std::isnan(number)) return ".nan";
    if (std::isinf(number)) return number > 0 ? ".inf" : "-.inf";
    auto text = python_repr(number);
    // 1e+17 would be read as a string: YAML 1.1 wants a dot.
    const auto e = text.find('e');
    if (e != std::string::npos && text.find('.') == std::string::npos) text.insert(e, ".0");
    return text;
  }

  bool write_string(const std::string& text, int column) {
    const auto written = StringEmitter().run(text);
    const auto lines = split(written, '\n');
    out_ += lines[0];
    for (const auto& line : std::span(lines).subspan(1)) {
      out_ += '\n';
      if (line.empty()) continue;
      indent(column);
      out_ += line.substr(kIndent);
    }
    return written[0] != '\'' && written[0] != '"';
  }

  std::string out_;
};

}  // namespace

std::string yaml_dumps(const Value& value) { return Writer().document(value); }

}  // namespace accelerate::detail::inline core
