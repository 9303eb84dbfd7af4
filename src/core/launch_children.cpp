#include "core/launch_children.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <string_view>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/exception_text.h"
#include "core/json.h"
#include "core/log.h"
#include "core/ports.h"
#include "core/process_variables.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

using Clock = ProcessSet::Clock;

// Which call a process was started for: "<file:line:column>#<ordinal>".
constexpr const char* kCallVariable = "ACCELERATE_SPAWNED_FOR";
// The descriptor its report goes to.
constexpr const char* kReportVariable = "ACCELERATE_SPAWN_REPORT_FD";
// Fits into an empty pipe, so that a child never waits for us to read.
constexpr std::size_t kReportLimit = 32768;
// A process that lost its peers fails because another did. Its turn to be blamed comes only when no
// other failure shows up within this time.
constexpr auto kTimeForTheCulprit = std::chrono::milliseconds(1000);

struct Failure {
  int rank = 0;
  bool consequence = false;  // of another's failure, probably
  std::int64_t nanoseconds = 0;
  std::string text = {};
};

// What a child tells.
struct Report {
  bool reached = false;  // the call, in a process made by kSpawn
  std::optional<Failure> failure = std::nullopt;
};

std::string environment_variable(const char* name) { return parse_choice_from_env(name, ""); }

std::int64_t monotonic_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// The same call gets the same name in every process that runs the same program.
std::string name_of_call(std::source_location where) {
  static std::mutex mutex;
  static std::map<std::string, int> counts;
  const std::string place = str(where.file_name(), ":", where.line(), ":", where.column());
  const std::scoped_lock lock(mutex);
  return str(place, "#", counts[place]++);
}

std::string one_line(const Value::Dict& message) {
  return json_dumps(message, {.replace_invalid = true}) + "\n";
}

// JSON may write one byte as six, so the text is cut by the size of the line.
void send_failure(int fd, const std::string& text, bool lost_peers) {
  Value::Dict message{{"lost_peers", lost_peers}, {"nanoseconds", monotonic_nanoseconds()}};
  std::string line;
  auto length = std::min(text.size(), kReportLimit);
  do {
    message["failed"] = text.substr(0, length);
    line = one_line(message);
    length /= 2;
  } while (line.size() > kReportLimit);
  write_fully(fd, line);
}

// Runs in the child. Whatever leaves `body` ends here.
int run_and_report(const std::function<void()>& body, int report_fd) {
  int code = 0;
  try {
    body();
  } catch (...) {
    code = 1;
    const ExceptionText exception = current_exception_text();
    bool lost_peers = false;
    try {
      throw;
    } catch (const CommError&) {
      lost_peers = true;
    } catch (...) {
    }
    send_failure(report_fd, exception.text(), lost_peers);
  }
  std::cout.flush();
  std::cerr.flush();
  std::clog.flush();
  std::fflush(nullptr);
  return code;
}

Report read_report(PipePair& pipe) {
  Report report;
  for (const auto& line : split(pipe.read_available(), '\n')) {
    const auto message = json_object(line);
    if (!message) continue;
    report.reached = report.reached || message->contains("reached");
    if (!message->contains("failed")) continue;
    // A CommError is likely the consequence of another process's failure.
    report.failure = {.consequence = message->get("lost_peers", false).as_bool(),
                      .nanoseconds = message->get("nanoseconds", 0).as_int(),
                      .text = message->at("failed").as_string()};
  }
  return report;
}

// The culprit before its victims, then the earlier.
bool comes_before(const Failure& a, const Failure& b) {
  return std::pair(a.consequence, a.nanoseconds) < std::pair(b.consequence, b.nanoseconds);
}

class Children {
 public:
  Children(const ChildrenOptions& options, std::string call, int attempt)
      : options_(options), call_(std::move(call)), attempt_(attempt), processes_(sink()) {}

  void start(const std::function<void()>& body) {
    for (int local_rank = 0; local_rank < options_.num_processes; ++local_rank) {
      reports_.emplace_back();
      if (options_.start_method == StartMethod::kFork) {
        fork(local_rank, body);
      } else {
        spawn(local_rank);
      }
      reports_.back().close_write();
    }
  }

  // Returns when all ended well; throws the first failure otherwise.
  void wait() {
    std::optional<Failure> first;
    std::optional<Clock::time_point> give_up;
    while (processes_.running() > 0) {
      const auto next_look = Clock::now() + options_.monitor_interval;
      for (const auto index :
           processes_.wait(give_up ? std::min(*give_up, next_look) : next_look)) {
        const auto failure = failure_of(index);
        if (failure && (!first || comes_before(*failure, *first))) first = failure;
      }
      if (!first) continue;
      if (!give_up) {
        give_up = first->consequence ? Clock::now() + kTimeForTheCulprit : Clock::now();
      }
      if (!first->consequence || Clock::now() >= *give_up) break;
    }
    if (!first) return;
    processes_.terminate(options_.grace);
    throw CommError(first->text, first->rank);
  }

 private:
  [[nodiscard]] int rank_of(int local_rank) const { return options_.first_rank + local_rank; }
  [[nodiscard]] bool serves(int local_rank) const {
    return options_.listen_fd && rank_of(local_rank) == 0;
  }

  [[nodiscard]] VariableChanges variables_of(int local_rank) const {
    auto variables = options_.variables(
        {.local_rank = local_rank, .rank = rank_of(local_rank), .attempt = attempt_});
    if (serves(local_rank)) variables.emplace_back(kListenFdVariable, str(*options_.listen_fd));
    return variables;
  }

  [[nodiscard]] SpawnOptions streams() const {
    SpawnOptions spawn;
    if (options_.log_line_prefix_template) {
      spawn.output = StreamTarget::kPipe;
      spawn.error = StreamTarget::kPipe;
    }
    return spawn;
  }

  void fork(int local_rank, const std::function<void()>& body) {
    const auto variables = variables_of(local_rank);
    const int report_fd = reports_.back().write_end();
    processes_.fork(streams(), [&] {
      for (const auto& [name, value] : variables) set_process_variable(name, value);
      // Closes the port when rank 0 is gone.
      if (options_.listen_fd && !serves(local_rank)) ::close(*options_.listen_fd);
      return run_and_report(body, report_fd);
    });
  }

  void spawn(int local_rank) {
    auto variables = variables_of(local_rank);
    const int report_fd = reports_.back().write_end();
    variables.emplace_back(kCallVariable, call_);
    variables.emplace_back(kReportVariable, str(report_fd));
    SpawnOptions spawn = streams();
    spawn.program = "/proc/self/exe";
    spawn.argv = own_command_line();
    spawn.environment = environment_with(variables);
    spawn.inherit = options_.inherit;
    spawn.inherit.push_back(report_fd);
    if (serves(local_rank)) spawn.inherit.push_back(*options_.listen_fd);
    processes_.spawn(spawn);
  }

  ProcessSet::Sink sink() const {
    if (!options_.log_line_prefix_template) return {};
    return [this](std::size_t index, ProcessSet::Stream stream, std::string_view line) {
      const int local_rank = static_cast<int>(index);
      const std::string text = str(fill_prefix_template(*options_.log_line_prefix_template,
                                                        "default", rank_of(local_rank), local_rank),
                                   line, "\n");
      write_fully(stream == ProcessSet::Stream::kOutput ? STDOUT_FILENO : STDERR_FILENO, text);
    };
  }

  std::optional<Failure> failure_of(std::size_t index) {
    const ExitStatus& status = processes_.status(index);
    Report report = read_report(reports_[index]);
    const int rank = rank_of(static_cast<int>(index));
    const std::string who = str(options_.launcher, ": rank ", rank);
    if (report.failure) {
      report.failure->rank = rank;
      report.failure->text = str(who, " failed: ", report.failure->text);
      return report.failure;
    }
    if (!status.ok()) {
      return Failure{rank, false, monotonic_nanoseconds(),
                     str(who, status.signal != 0 ? " was ended by " : " ended with ", status.text(),
                         " and left no message.")};
    }
    if (options_.start_method == StartMethod::kSpawn && !report.reached) {
      return Failure{rank, false, monotonic_nanoseconds(),
                     str(who, " ended before it reached the call at ", options_.where.file_name(),
                         ":", options_.where.line(),
                         ". The program must come to that call again with the same arguments when "
                         "it is started anew.")};
    }
    return std::nullopt;
  }

  const ChildrenOptions& options_;
  std::string call_;
  int attempt_;
  std::vector<PipePair> reports_;
  ProcessSet processes_;
};

// The call this process was started for, until it has been reached.
std::string& awaited_call() {
  static std::string call = environment_variable(kCallVariable);
  return call;
}

[[noreturn]] void run_as_spawned_child(const std::function<void()>& body) {
  awaited_call().clear();
  const int report_fd = std::atoi(environment_variable(kReportVariable).c_str());
  // What this process starts in turn is not meant.
  set_process_variable(kCallVariable, std::nullopt);
  set_process_variable(kReportVariable, std::nullopt);
  write_fully(report_fd, one_line({{"reached", true}}));
  ::_exit(run_and_report(body, report_fd));
}

// Whether the CUDA driver has been initialised in this process. Initialises nothing.
bool cuda_is_initialised() {
  // Only if something has loaded the driver already; loading it here would be the first step.
  void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  using DeviceCount = int (*)(int*);
  const auto device_count = reinterpret_cast<DeviceCount>(::dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  // Answers "not initialized" before cuInit.
  const bool initialised = device_count != nullptr && device_count(&count) == 0;
  ::dlclose(driver);
  return initialised;
}

// Throws `StateError` when this process cannot be copied: other threads run, or CUDA is in use.
void refuse_unsafe_fork(const std::string& launcher) {
  constexpr std::string_view kRemedy =
      " Launch before anything else is computed, or use StartMethod::kSpawn.";
  if (cuda_is_initialised()) {
    throw StateError(str(
        launcher, ": CUDA is in use in this process and does not work in copies of it.", kRemedy));
  }
  if (const auto threads = count_threads(); threads > 1) {
    throw StateError(str(launcher, ": ", threads - 1,
                         threads == 2 ? " other thread runs" : " other threads run",
                         " in this process and would be missing in copies of it, with whatever "
                         "locks they hold.",
                         kRemedy));
  }
}

}  // namespace

bool on_the_way_to_a_launcher() { return !awaited_call().empty(); }

void launch_children(const ChildrenOptions& options, const std::function<void()>& body) {
  const std::string call = name_of_call(options.where);
  if (on_the_way_to_a_launcher()) {
    if (call == awaited_call()) run_as_spawned_child(body);
    return;
  }
  if (options.start_method == StartMethod::kFork) refuse_unsafe_fork(options.launcher);
  for (int attempt = 0;; ++attempt) {
    Children children(options, call, attempt);
    children.start(body);
    try {
      return children.wait();
    } catch (const CommError& error) {
      if (attempt >= options.max_restarts) throw;
      warn(str(error.what(), "\nAll processes are started again (restart ", attempt + 1, " of ",
               options.max_restarts, ")."));
    }
  }
}

std::string fill_prefix_template(const std::string& pattern, const std::string& role, int rank,
                                 int local_rank) {
  const std::vector<std::pair<std::string, std::string>> values = {
      {"${role_name}", role}, {"${rank}", str(rank)}, {"${local_rank}", str(local_rank)}};
  std::string text = pattern;
  for (const auto& [name, value] : values) {
    for (auto at = text.find(name); at != std::string::npos;
         at = text.find(name, at + value.size())) {
      text.replace(at, name.size(), value);
    }
  }
  return text;
}

}  // namespace accelerate::detail::inline core
