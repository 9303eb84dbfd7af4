#include "comm/call_log.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "comm/collective_totals.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

constexpr std::array<const char*, 9> kReductions = {"sum",  "avg", "product", "min",       "max",
                                                    "band", "bor", "bxor",    "premul_sum"};

template <std::size_t N>
void copy_text(char (&to)[N], const char* from) noexcept {
  const auto length = std::min(std::strlen(from), N - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdULL;
}

std::uint64_t mix(std::uint64_t hash, std::string_view text) noexcept {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return mix(hash, text.size());
}

std::atomic<std::int64_t> time_in_collectives{0};

bool place_counts(std::string_view kind) { return kind != "barrier" && kind != "broadcast"; }

ReportedCall reported(const CallRecord& call, std::uint64_t open) {
  return {.sequence = call.sequence,
          .signature = call.signature,
          .text = call.text(),
          .complete = call.complete,
          .open = open};
}

}  // namespace

std::int64_t nanoseconds_in_collectives() noexcept {
  return time_in_collectives.load(std::memory_order_relaxed);
}

void add_time_in_collectives(std::chrono::nanoseconds time) noexcept {
  time_in_collectives.fetch_add(time.count(), std::memory_order_relaxed);
}

std::uint64_t signature_of(const CallFacts& facts, const CallSite& site) {
  auto hash = mix(0xcbf29ce484222325ULL, facts.kind);
  hash = mix(hash, facts.dtype);
  for (const auto size : facts.sizes) hash = mix(hash, static_cast<std::uint64_t>(size));
  hash = mix(hash, facts.sizes.size());
  hash = mix(hash, static_cast<std::uint64_t>(facts.reduction) + 1);
  hash = mix(hash, static_cast<std::uint64_t>(facts.root) + 1);
  hash = mix(hash, facts.content);
  if (site.call != nullptr) hash = mix(mix(hash, site.call->operation), site.call->content);
  if (site.name != nullptr) {
    hash = mix(hash, site.name);
  } else if (place_counts(facts.kind)) {
    hash = mix(mix(hash, site.file), site.line);
  }
  return hash == 0 ? 1 : hash;
}

std::string CallRecord::text() const {
  std::string result = kind;
  if (reduction >= 0 && reduction < static_cast<int>(kReductions.size())) {
    result += str(" ", kReductions[static_cast<std::size_t>(reduction)]);
  }
  if (dimensions >= 0) {
    result += str(" ", dtype, "[");
    const int shown = std::min<int>(dimensions, 6);
    for (int i = 0; i < shown; ++i) result += str(i > 0 ? "," : "", sizes[i]);
    result += dimensions > shown ? ",...]" : "]";
    if (tensors > 1) result += str(" and ", tensors - 1, " more");
  }
  result += more;
  if (root >= 0) result += str(" with root ", root);
  if (name[0] != '\0') result += str(" named '", name, "'");
  if (file[0] != '\0') result += str(" at ", file, ":", line);
  if (remark[0] != '\0') result += str(", after ", remark);
  return result;
}

ReportedCall read_page(const CallPage& page) {
  CallRecord call;
  std::uint64_t open = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const auto before = page.version.load(std::memory_order_acquire);
    std::memcpy(&call, &page.call, sizeof call);
    open = page.open;
    // A torn text is possible after all attempts, and harmless: it is only shown.
    if (before % 2 == 0 && page.version.load(std::memory_order_acquire) == before) break;
  }
  // The writer may have died in the middle of a text.
  for (char* end : {std::end(call.kind), std::end(call.dtype), std::end(call.file),
                    std::end(call.name), std::end(call.more), std::end(call.remark)}) {
    end[-1] = '\0';
  }
  return reported(call, open);
}

Ticket CallLog::enter(const CallFacts& facts, const CallSite& site) {
  const auto signature = signature_of(facts, site);
  const std::scoped_lock lock(mutex_);
  Entry& entry = this->entry(++last_);
  CallRecord& next = entry.call;
  next.sequence = last_;
  next.signature = signature;
  // Shows the call of the user if it is known.
  const auto* call = site.call;
  const auto sizes = call != nullptr ? call->sizes : facts.sizes;
  const char* dtype = call != nullptr ? call->dtype : facts.dtype;
  next.dimensions = dtype[0] == '\0' ? -1 : static_cast<int>(sizes.size());
  std::copy_n(sizes.begin(), std::min(sizes.size(), std::size(next.sizes)), next.sizes);
  next.tensors = call != nullptr ? call->tensors : 1;
  next.reduction = facts.reduction;
  next.root = facts.root;
  next.line = site.line;
  copy_text(next.kind, call != nullptr ? call->operation : facts.kind);
  copy_text(next.dtype, dtype);
  copy_text(next.file, site.file);
  copy_text(next.name, site.name != nullptr ? site.name : "");
  copy_text(next.more, call != nullptr ? call->more : facts.more);
  copy_text(next.remark, site.remark != nullptr ? site.remark : "");
  next.complete = false;
  entry.since = Clock::now();
  entry.bytes = facts.bytes;
  entry.timed = !facts.on_device;
  if (entry.timed && timed_calls_++ == 0) timed_since_ = entry.since;
  if (page_ != nullptr) {
    page_->version.fetch_add(1, std::memory_order_acq_rel);
    page_->call = next;
    page_->open = oldest_open_;
    page_->version.fetch_add(1, std::memory_order_release);
  }
  return {.sequence = last_, .signature = signature};
}

void CallLog::leave(const Ticket& ticket) noexcept {
  const std::scoped_lock lock(mutex_);
  Entry& left = entry(ticket.sequence);
  CallRecord& done = left.call;
  if (done.sequence != ticket.sequence) return;
  done.complete = true;
  if (collectives_counted.load(std::memory_order_relaxed)) {
    add_collective(done.kind, left.bytes, Clock::now() - left.since);
  }
  if (std::exchange(left.timed, false) && --timed_calls_ == 0) {
    add_time_in_collectives(Clock::now() - timed_since_);
  }
  while (oldest_open_ <= last_ && entry(oldest_open_).call.complete) ++oldest_open_;
  if (page_ == nullptr) return;
  if (page_->call.sequence == ticket.sequence) page_->call.complete = true;
  page_->open = oldest_open_;
}

ReportedCall CallLog::report(const Entry& entry) const {
  return reported(entry.call, oldest_open_);
}

std::optional<ReportedCall> CallLog::waiting(Clock::time_point since) const {
  const std::scoped_lock lock(mutex_);
  if (oldest_open_ > last_) return std::nullopt;
  const Entry& oldest = entry(oldest_open_);
  if (oldest.call.sequence != oldest_open_ || oldest.since > since) return std::nullopt;
  return report(oldest);
}

ReportedCall CallLog::report(std::uint64_t sequence) const {
  const std::scoped_lock lock(mutex_);
  const Entry& asked = entry(sequence);
  if (sequence > 0 && asked.call.sequence == sequence) return report(asked);
  return last_ == 0 ? ReportedCall{} : report(entry(last_));
}

ReportedCall CallLog::last_completed() const {
  const std::scoped_lock lock(mutex_);
  const Entry& last = entry(oldest_open_ - 1);
  const bool known = oldest_open_ > 1 && last.call.sequence == oldest_open_ - 1;
  return known ? report(last) : ReportedCall{};
}

ReportedCall CallLog::latest() const {
  const std::scoped_lock lock(mutex_);
  return last_ == 0 ? ReportedCall{} : report(entry(last_));
}

}  // namespace accelerate::detail::comm
