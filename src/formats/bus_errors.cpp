#include "formats/bus_errors.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

namespace accelerate::detail::formats {

// Entries are reused and never freed, because the handler may be walking the list.
struct Entry {
  std::atomic<std::uintptr_t> begin = 0;
  std::atomic<std::uintptr_t> end = 0;  // 0: not in use
  std::string name;
  Entry* next = nullptr;
};

namespace {

std::atomic<Entry*> entries = nullptr;
std::mutex entries_mutex;  // for changes; the handler takes no lock
struct sigaction handler_before;

void say(const char* text, std::size_t size) {
  static_cast<void>(::write(STDERR_FILENO, text, size));
}

// Only what a signal handler may call.
void report(const Entry& entry, std::uintptr_t address) {
  char digits[24];
  char* at = digits + sizeof digits;
  auto offset = address - entry.begin.load();
  do {
    *--at = static_cast<char>('0' + offset % 10);
    offset /= 10;
  } while (offset != 0);
  const auto text = [](const char* words) { say(words, std::strlen(words)); };
  text("accelerate: '");
  say(entry.name.data(), entry.name.size());
  text("' was cut while its tensors were in use: byte ");
  say(at, static_cast<std::size_t>(digits + sizeof digits - at));
  text(" is gone. Replace a file by renaming a new one over it.\n");
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  // A positive code is a fault; others are signals that a process sent.
  for (const Entry* entry = info->si_code > 0 ? entries.load() : nullptr; entry != nullptr;
       entry = entry->next) {
    if (address < entry->begin.load() || address >= entry->end.load()) continue;
    report(*entry, address);
    break;
  }
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
    handler_before.sa_sigaction(number, info, context);
  } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    handler_before.sa_handler(number);
  } else {
    std::signal(number, SIG_DFL);
    std::raise(number);  // blocked until this handler returns
  }
}

void install_handler() {
  static const bool once = [] {
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGBUS, &action, &handler_before);
    return true;
  }();
  static_cast<void>(once);
}

Entry* unused_entry() {
  for (Entry* entry = entries.load(); entry != nullptr; entry = entry->next) {
    if (entry->end.load() == 0) return entry;
  }
  auto* entry = new Entry;
  entry->next = entries.load();
  entries.store(entry);
  return entry;
}

}  // namespace

MappingName::MappingName(const void* begin, std::size_t size, std::string name) {
  const std::lock_guard lock(entries_mutex);
  install_handler();
  entry_ = unused_entry();
  entry_->name = std::move(name);
  entry_->begin = reinterpret_cast<std::uintptr_t>(begin);
  entry_->end = reinterpret_cast<std::uintptr_t>(begin) + size;
}

MappingName::~MappingName() { entry_->end = 0; }

}  // namespace accelerate::detail::formats
