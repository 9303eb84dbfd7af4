#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/launchers.h"
#include "core/exception_text.h"
#include "core/failure_hook.h"
#include "core/json.h"
#include "core/log.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

constexpr const char* kFileVariable = "TORCHELASTIC_ERROR_FILE";
constexpr int kFailure = 1;
constexpr int kWrongInput = 2;
constexpr int kPeersDisagree = 70;

// Only inside a catch block.
int exit_code_of_current_exception() {
  try {
    throw;
  } catch (const ConfigError&) {
    return kWrongInput;
  } catch (const CommError&) {
    return kPeersDisagree;
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

int record_errors(const std::function<int()>& main) {
  try {
    return main();
  } catch (...) {
    const ExceptionText exception = current_exception_text();
    const int code = exit_code_of_current_exception();
    const std::string& text = exception.message.empty() ? exception.type : exception.message;
    write_fully(STDERR_FILENO, str("accelerate: ", text, "\n"));
    if (const auto tell = failure_hook.load(); tell != nullptr && code != kPeersDisagree) {
      tell(exception.text());
    }
    if (const auto path = Environment::process().get(kFileVariable)) {
      write_error_file(*path, exception);
    }
    return code;
  }
}

}  // namespace accelerate::detail::inline core
