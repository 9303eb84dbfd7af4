#include "comm/collective_totals.h"

#include <algorithm>
#include <mutex>

namespace accelerate::detail::comm {
namespace {

std::mutex mutex;

std::vector<CollectiveTotal>& totals() {
  static auto* const all = new std::vector<CollectiveTotal>;  // calls may end after static objects
  return *all;
}

}  // namespace

std::atomic<bool> collectives_counted{false};

void count_collectives(bool on) {
  const std::scoped_lock lock(mutex);
  if (on) totals().clear();
  collectives_counted.store(on, std::memory_order_relaxed);
}

std::vector<CollectiveTotal> collective_totals() {
  const std::scoped_lock lock(mutex);
  return totals();
}

void add_collective(const char* kind, std::int64_t bytes, std::chrono::nanoseconds under_way) {
  const std::scoped_lock lock(mutex);
  if (!collectives_counted.load(std::memory_order_relaxed)) return;
  auto& all = totals();
  auto found = std::ranges::find(all, kind, &CollectiveTotal::kind);
  if (found == all.end()) found = all.insert(found, CollectiveTotal{.kind = kind});
  ++found->calls;
  found->bytes += bytes;
  found->under_way += under_way;
}

}  // namespace accelerate::detail::comm
