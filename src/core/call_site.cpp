#include "core/call_site.h"

#include <algorithm>
#include <cstring>

#include "accelerate/logging/name_collectives.h"

namespace accelerate {
namespace detail::inline core {
namespace {

thread_local CallSite here;
thread_local bool is_here = false;
thread_local const char* scope_name = nullptr;
thread_local const char* remark_here = nullptr;
thread_local const UserCall* user_call = nullptr;

const char* without_folders(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

}  // namespace

CallSite current_call_site() noexcept {
  CallSite site = is_here ? here : CallSite{};
  site.name = scope_name;
  site.remark = remark_here;
  site.call = user_call;
  return site;
}

AtCallSite::AtCallSite(const std::source_location& where) noexcept : outermost_(!is_here) {
  if (!outermost_) return;
  here = {.file = without_folders(where.file_name()), .line = where.line()};
  is_here = true;
}

AtCallSite::~AtCallSite() {
  if (outermost_) is_here = false;
}

AfterRemark::AfterRemark(const char* remark) noexcept { remark_here = remark; }

AfterRemark::~AfterRemark() { remark_here = nullptr; }

AsUserCall::AsUserCall(const UserCall& call) noexcept : before_(user_call) { user_call = &call; }

AsUserCall::~AsUserCall() { user_call = before_; }

}  // namespace detail::inline core

NamedCollectives::NamedCollectives(std::string_view name) : before_(detail::scope_name) {
  name.copy(name_, std::min(name.size(), sizeof name_ - 1));
  detail::scope_name = name_;
}

NamedCollectives::~NamedCollectives() { detail::scope_name = before_; }

}  // namespace accelerate
