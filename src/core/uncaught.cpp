#include "core/uncaught.h"

#include <unistd.h>

#include <cstdlib>
#include <exception>

#include "core/exception_text.h"
#include "core/failure_hook.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

constexpr int kRanksDisagree = 70;

std::terminate_handler& handler_before() {
  static std::terminate_handler handler = nullptr;
  return handler;
}

[[noreturn]] void end_by_exception() {
  if (std::current_exception()) {
    try {
      throw;
    } catch (const CommError& error) {
      end_with_error(error);  // the others know it already
    } catch (...) {
      if (const auto hook = failure_hook.load()) hook(current_exception_text().text());
    }
  }
  if (handler_before() != nullptr) handler_before()();
  std::abort();
}

}  // namespace

void end_with_error(const CommError& error) {
  write_fully(STDERR_FILENO, str("accelerate: ", error.what(), "\n"));
  ::_exit(kRanksDisagree);
}

void handle_uncaught_exceptions() {
  static const bool once = [] {
    handler_before() = std::set_terminate(end_by_exception);
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace accelerate::detail::inline core
