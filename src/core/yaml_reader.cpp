#include <yaml.h>

#include <algorithm>
#include <map>
#include <memory>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/yaml.h"
#include "core/yaml_scalar.h"

namespace accelerate::detail::inline core {
namespace {

// What aliases may add to a document, counted as memory: stops "billion laughs" files.
constexpr std::size_t kMaxAliasBytes = std::size_t{64} << 20;

constexpr std::string_view kTagPrefix = "tag:yaml.org,2002:";

// A value and what it costs to repeat it.
struct Node {
  Value value = {};
  int height = 0;         ///< levels below
  std::size_t bytes = 0;  ///< roughly, in memory
};

// An event of libyaml that frees itself.
class Event {
 public:
  Event() = default;
  ~Event() { yaml_event_delete(&event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  yaml_event_t* get() { return &event_; }
  [[nodiscard]] yaml_event_type_t type() const { return event_.type; }
  [[nodiscard]] const yaml_mark_t& mark() const { return event_.start_mark; }
  const yaml_event_t* operator->() const { return &event_; }

 private:
  yaml_event_t event_{};
};

std::string_view view(const yaml_char_t* text) {
  return text == nullptr ? std::string_view() : reinterpret_cast<const char*>(text);
}

class Reader {
 public:
  Reader(std::string_view text, std::string_view source, bool unique_keys)
      : text_(text), source_(source), unique_keys_(unique_keys) {
    if (text_.starts_with("\xEF\xBB\xBF")) text_.remove_prefix(3);  // a byte order mark
    if (yaml_parser_initialize(&parser_) == 0) throw std::bad_alloc();
    yaml_parser_set_input_string(&parser_, reinterpret_cast<const unsigned char*>(text_.data()),
                                 text_.size());
    yaml_parser_set_encoding(&parser_, YAML_UTF8_ENCODING);
  }
  ~Reader() { yaml_parser_delete(&parser_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  Value document() {
    next();  // the start of the stream
    if (next()->type() == YAML_STREAM_END_EVENT) return {};
    Node root = read_node(*next(), 0);
    next();  // the end of the document
    const auto after = next();
    if (after->type() != YAML_STREAM_END_EVENT) {
      refuse("there is a second document; one was expected", after->mark());
    }
    return std::move(root.value);
  }

 private:
  [[noreturn]] void refuse(std::string_view problem, const yaml_mark_t& mark) const {
    throw ConfigError(
        str(source_, ", line ", mark.line + 1, ", column ", mark.column + 1, ": ", problem, "."));
  }

  std::unique_ptr<Event> next() {
    auto event = std::make_unique<Event>();
    if (yaml_parser_parse(&parser_, event->get()) == 0) refuse_syntax();
    return event;
  }

  [[noreturn]] void refuse_syntax() const {
    if (parser_.error == YAML_MEMORY_ERROR) throw std::bad_alloc();
    std::string problem = parser_.problem != nullptr ? parser_.problem : "this is not YAML";
    if (parser_.context != nullptr) problem = str(parser_.context, ", ", problem);
    refuse(problem, parser_.error == YAML_READER_ERROR ? mark_at(parser_.problem_offset)
                                                       : parser_.problem_mark);
  }

  // What reads the bytes knows offsets and no lines.
  [[nodiscard]] yaml_mark_t mark_at(std::size_t offset) const {
    const auto before = text_.substr(0, offset);
    const auto line_end = before.rfind('\n');
    yaml_mark_t mark{};
    mark.line = static_cast<std::size_t>(std::ranges::count(before, '\n'));
    mark.column = line_end == before.npos ? before.size() : before.size() - line_end - 1;
    return mark;
  }

  Node read_node(const Event& event, int depth) {
    if (depth > kMaxValueDepth) {
      refuse(str("the value is nested deeper than ", kMaxValueDepth, " levels"), event.mark());
    }
    switch (event.type()) {
      case YAML_ALIAS_EVENT:
        return read_alias(event, depth);
      case YAML_SCALAR_EVENT: {
        const Node node{.value = read_scalar(event),
                        .bytes = sizeof(Value) + event->data.scalar.length};
        remember(event->data.scalar.anchor, node);
        return node;
      }
      case YAML_SEQUENCE_START_EVENT:
        return read_sequence(event, depth);
      case YAML_MAPPING_START_EVENT:
        return read_mapping(event, depth);
      default:
        refuse("expected a value", event.mark());
    }
  }

  void begin(const Event& event, const yaml_char_t* anchor, const yaml_char_t* tag,
             std::string_view kind) {
    const auto given = view(tag);
    if (!given.empty() && given != "!" && given != str(kTagPrefix, kind)) refuse_tag(given, event);
    // Until the end is reached there is nothing to repeat; an older anchor of that name is gone.
    if (anchor != nullptr) anchors_[std::string(view(anchor))] = std::nullopt;
  }

  void remember(const yaml_char_t* anchor, const Node& node) {
    if (anchor != nullptr) anchors_[std::string(view(anchor))] = node;
  }

  Node read_alias(const Event& event, int depth) {
    const auto name = view(event->data.alias.anchor);
    const auto found = anchors_.find(std::string(name));
    if (found == anchors_.end()) {
      refuse(str("the alias '", name, "' has no anchor before it"), event.mark());
    }
    if (!found->second) {
      refuse(str("the alias '", name, "' is inside its own anchor"), event.mark());
    }
    const Node& node = *found->second;
    if (depth + node.height > kMaxValueDepth) {
      refuse(str("the value is nested deeper than ", kMaxValueDepth, " levels"), event.mark());
    }
    alias_bytes_ += node.bytes;
    if (alias_bytes_ > kMaxAliasBytes) {
      refuse("the aliases make the document larger than 64 MiB", event.mark());
    }
    return node;
  }

  Node read_sequence(const Event& start, int depth) {
    const auto& [anchor, tag, implicit, style] = start->data.sequence_start;
    begin(start, anchor, tag, "seq");
    Node node{.bytes = sizeof(Value)};
    Value::List list;
    for (auto event = next(); event->type() != YAML_SEQUENCE_END_EVENT; event = next()) {
      Node item = read_node(*event, depth + 1);
      count(node, item);
      list.push_back(std::move(item.value));
    }
    node.value = std::move(list);
    remember(anchor, node);
    return node;
  }

  Node read_mapping(const Event& start, int depth) {
    const auto& [anchor, tag, implicit, style] = start->data.mapping_start;
    begin(start, anchor, tag, "map");
    Node node{.bytes = sizeof(Value)};
    Value::Dict merged;
    Value::Dict own;
    for (auto event = next(); event->type() != YAML_MAPPING_END_EVENT; event = next()) {
      if (is_merge(*event)) {
        const auto mark = event->mark();
        Node source = read_node(*next(), depth + 1);
        count(node, source);
        merge(std::move(source.value), merged, mark);
        continue;
      }
      Node key = read_node(*event, depth + 1);
      const auto mark = event->mark();
      Node item = read_node(*next(), depth + 1);
      count(node, key);
      count(node, item);
      const auto name = as_key(key.value, mark);
      if (unique_keys_ && own.contains(name)) {
        refuse(str("the key ", key.value.repr(), " is here a second time"), mark);
      }
      own.set(name, std::move(item.value));
    }
    // Keys of the mapping itself win, wherever the merge stands.
    for (auto& [key, value] : own) merged.set(key, std::move(value));
    node.value = std::move(merged);
    remember(anchor, node);
    return node;
  }

  static void count(Node& node, const Node& part) {
    node.height = std::max(node.height, part.height + 1);
    node.bytes += part.bytes;
  }

  static bool is_merge(const Event& event) {
    return event.type() == YAML_SCALAR_EVENT && event->data.scalar.plain_implicit != 0 &&
           view(event->data.scalar.value) == "<<";
  }

  void merge(Value source, Value::Dict& into, const yaml_mark_t& mark) const {
    const std::string_view wanted = "a merge key needs a mapping or a list of mappings";
    if (source.is_dict()) source = Value::list({std::move(source)});
    if (!source.is_list()) refuse(wanted, mark);
    // The first of the list wins: put it on top of the later ones.
    auto& parts = source.as_list();
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      if (!part->is_dict()) refuse(wanted, mark);
      for (auto& [key, value] : part->as_dict()) into.set(key, std::move(value));
    }
  }

  ValueKeyView as_key(const Value& value, const yaml_mark_t& mark) const {
    if (value.is_string()) return value.as_string();
    if (value.is_int()) return value.as_int();
    if (value.is_bool()) return value.as_bool();
    refuse(str("a key must be a string, an int or a bool, not ", value.kind_name()), mark);
  }

  [[noreturn]] void refuse_tag(std::string_view tag, const Event& event) const {
    refuse(str("the tag '", tag, "' is not supported"), event.mark());
  }

  Value read_scalar(const Event& event) const {
    const auto& scalar = event->data.scalar;
    // With the length: a quoted scalar may hold zero bytes.
    const std::string_view text(reinterpret_cast<const char*>(scalar.value), scalar.length);
    const auto tag = view(scalar.tag);
    if (tag == "!" || (tag.empty() && scalar.plain_implicit != 0)) {
      return construct(resolve_yaml(text), text, event);
    }
    if (tag.empty()) return text;
    static const std::map<std::string, YamlTag> kTags{
        {"str", YamlTag::kString},  {"bool", YamlTag::kBool}, {"int", YamlTag::kInt},
        {"float", YamlTag::kFloat}, {"null", YamlTag::kNull}, {"timestamp", YamlTag::kTimestamp}};
    const auto known = tag.starts_with(kTagPrefix)
                           ? kTags.find(std::string(tag.substr(kTagPrefix.size())))
                           : kTags.end();
    if (known == kTags.end()) refuse_tag(tag, event);
    return construct_tagged(known->second, text, event);
  }

  // A text under an explicit tag must be what the tag says.
  Value construct_tagged(YamlTag tag, std::string_view text, const Event& event) const {
    const auto found = resolve_yaml(text);
    if (tag == YamlTag::kString || tag == YamlTag::kTimestamp) return text;
    if (tag == YamlTag::kNull) return {};
    if (tag == YamlTag::kFloat && found == YamlTag::kInt) {
      if (const auto number = read_yaml_int(text)) return static_cast<double>(*number);
    }
    if (tag != found) refuse(str("'", text, "' does not fit its tag"), event.mark());
    return construct(tag, text, event);
  }

  Value construct(YamlTag tag, std::string_view text, const Event& event) const {
    switch (tag) {
      case YamlTag::kNull:
        return {};
      case YamlTag::kBool:
        return *read_yaml_bool(text);
      case YamlTag::kFloat:
        return read_yaml_float(text);
      case YamlTag::kInt:
        if (const auto number = read_yaml_int(text)) return *number;
        refuse(str("the integer '", text, "' does not fit into 64 bits"), event.mark());
      default:
        return text;
    }
  }

  yaml_parser_t parser_{};
  std::string_view text_;
  std::string_view source_;
  bool unique_keys_;
  std::map<std::string, std::optional<Node>> anchors_;
  std::size_t alias_bytes_ = 0;
};

}  // namespace

Value yaml_loads(std::string_view text, std::string_view source) {
  return Reader(text, source, /*unique_keys=*/false).document();
}

Value yaml_loads_unique(std::string_view text, std::string_view source) {
  return Reader(text, source, /*unique_keys=*/true).document();
}

}  // namespace accelerate::detail::inline core
