#include "core/uncaught.h"

#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>

#include "accelerate/environment.h"
#include "accelerate/launchers.h"
#include "core/exception_text.h"
#include "core/json.h"
#include "core/log.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

constexpr const char* kFileVariable = "TORCHELASTIC_ERROR_FILE";
constexpr int kFailure = 1;
constexpr int kWrongInput = 2;
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

// Only inside a catch block.
int exit_code_of_current_exception() {
  try {
    throw;
  } catch (const ConfigError&) {
    return kWrongInput;
  } catch (const CommError&) {
    return kRanksDisagree;
  } catch (...) {
    return kFailure;
  }
}

// The form that torchrun, its agents and our launcher read.
void write_error_file(const std::string& path, const ExceptionText& exception) {
  const Value::Dict details{
      {"py_callstack", exception.stack.empty() ? exception.text() : exception.stack},
      {"timestamp", str(std::time(nullptr))}};
  const Value content =
      Value::Dict{{"message", Value::Dict{{"message", exception.text()}, {"extraInfo", details}}}};
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  std::ofstream file(path);
  file << json_dumps(content, {.replace_invalid = true});
  file.close();
  if (!file) warn(str("The error could not be written to ", path, " (", kFileVariable, ")."));
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

int record_errors(const std::function<int()>& main) {
  try {
    return main();
  } catch (...) {
    const ExceptionText exception = current_exception_text();
    const int code = exit_code_of_current_exception();
    const std::string& text = exception.message.empty() ? exception.type : exception.message;
    write_fully(STDERR_FILENO, str("accelerate: ", text, "\n"));
    if (const auto tell = failure_hook.load(); tell != nullptr && code != kRanksDisagree) {
      tell(exception.text());
    }
    if (const auto path = Environment::process().get(kFileVariable)) {
      write_error_file(*path, exception);
    }
    return code;
  }
}

}  // namespace accelerate::detail::inline core
