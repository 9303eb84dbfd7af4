#include "core/call_site.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "accelerate/logging/name_collectives.h"

namespace accelerate {
namespace detail::inline core {
namespace {

thread_local CallSite here;
thread_local bool is_here = false;
thread_local const char* scope_name = nullptr;
thread_local const char* backward_name = nullptr;
thread_local const char* remark_here = nullptr;
thread_local const UserCall* user_call = nullptr;

const char* without_folders(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

// Compilers write "./src/a.cpp" or "../../src/a.cpp" for the same file: ccache and files compiled
// together decide.
constexpr std::string_view without_dots(std::string_view path) {
  while (path.starts_with("./") || path.starts_with("../")) path.remove_prefix(path.find('/') + 1);
  return path;
}

// True for a source file of this library, whose lines say nothing to a user.
bool is_ours(std::string_view path) {
  constexpr std::string_view kThis = without_dots(std::source_location::current().file_name());
  constexpr auto kFolder = kThis.substr(0, kThis.rfind("core/call_site.cpp"));
  static_assert(kFolder.size() < kThis.size());
  return without_dots(path).starts_with(kFolder);
}

}  // namespace

CallSite current_call_site() noexcept {
  CallSite site = is_here ? here : CallSite{};
  site.name = scope_name;
  site.name_in_backward = backward_name;
  site.remark = remark_here;
  site.call = user_call;
  return site;
}

AtCallSite::AtCallSite(const std::source_location& where) noexcept : outermost_(!is_here) {
  if (!outermost_) return;
  is_here = true;
  here = {};
  // What the library calls under a name of its own is known by that name.
  if (scope_name != nullptr && is_ours(where.file_name())) return;
  here = {.file = without_folders(where.file_name()), .line = where.line()};
}

AtCallSite::~AtCallSite() {
  if (outermost_) is_here = false;
}

AfterRemark::AfterRemark(const char* remark) noexcept { remark_here = remark; }

AfterRemark::~AfterRemark() { remark_here = nullptr; }

AsUserCall::AsUserCall(const UserCall& call) noexcept : before_(user_call) { user_call = &call; }

AsUserCall::~AsUserCall() { user_call = before_; }

NamedInBackward::NamedInBackward() noexcept : before_(backward_name) { backward_name = scope_name; }

NamedInBackward::~NamedInBackward() { backward_name = before_; }

}  // namespace detail::inline core

NamedCollectives::NamedCollectives(std::string_view name) : before_(detail::scope_name) {
  name.copy(name_, std::min(name.size(), sizeof name_ - 1));
  detail::scope_name = name_;
}

NamedCollectives::~NamedCollectives() { detail::scope_name = before_; }

}  // namespace accelerate
