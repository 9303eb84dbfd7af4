#include "comm/call_facts.h"

#include <array>
#include <string>

#include "accelerate/value/to_value.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

// Tensors are listed one by one up to this length, which the guard stores for each call.
constexpr std::size_t kMostText = 64;

std::uint64_t mix(std::uint64_t hash, std::int64_t value) {
  hash ^= static_cast<std::uint64_t>(value) + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdULL;
}

std::string tensor_text(const at::Tensor& tensor) {
  return str(dtype_literal(tensor.scalar_type()), "[", join(tensor.sizes().vec(), ","), "]");
}

}  // namespace

const char* dtype_literal(at::ScalarType dtype) {
  constexpr auto kCount = static_cast<std::size_t>(at::ScalarType::NumOptions);
  static const auto* const names = [] {
    auto* all = new std::array<std::string, kCount>;
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto name = dtype_name(static_cast<at::ScalarType>(i));
      (*all)[i] = name.substr(name.rfind('.') + 1);  // without "torch."
    }
    return all;
  }();
  const auto index = static_cast<std::size_t>(dtype);
  return index < kCount ? (*names)[index].c_str() : "?";
}

std::string message_text(bool sends, const at::Tensor& tensor, int peer) {
  return str(sends ? "send " : "recv ", tensor_text(tensor), sends ? " to " : " from ",
             peer < 0 ? std::string("any rank") : str("rank ", peer));
}

void CallFactsBuilder::add_next(const at::Tensor& tensor) {
  content = mix(mix(content, tensors), static_cast<std::int64_t>(tensor.scalar_type()));
  for (const auto size : tensor.sizes()) content = mix(content, size);
  content = mix(content, tensor.dim());
  elements += tensor.numel();
  append(tensor_text(tensor), "tensors");
}

void CallFactsBuilder::add(const CallFacts& call) {
  std::int64_t count = call.dtype[0] == '\0' ? 0 : 1;
  content = mix(content, ++tensors);
  for (const char* text : {call.kind, call.dtype}) {
    for (; *text != '\0'; ++text) content = mix(content, *text);
    content = mix(content, 0);
  }
  for (const auto size : call.sizes) {
    content = mix(content, size);
    count *= size;
  }
  content = mix(mix(content, call.reduction), call.root);
  content = mix(content, static_cast<std::int64_t>(call.content));
  elements += count;
  bytes += call.bytes;
  append(str(call.kind, " ", call.dtype, "[", join(call.sizes, ","), "]"), "calls");
}

void CallFactsBuilder::append(const std::string& next, const char* what) {
  const bool fits = more.size() == shown && shown + next.size() + 2 <= kMostText;
  if (fits) {
    more += str(", ", next);
    shown = more.size();
  } else {
    more.resize(shown);
    more += str(", ... (", tensors, " ", what, ", ", elements, " elements)");
  }
}

}  // namespace accelerate::detail::comm
