#include "launch/workers.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <system_error>
#include <utility>

#include "core/launch_children.h"
#include "core/text.h"
#include "core/world.h"
#include "launch/messages.h"

namespace accelerate::detail::launch {
namespace {

using Stream = ProcessSet::Stream;

constexpr const char* kDefaultPrefix = "[${role_name}${local_rank}]:";
// Bytes at the end of a file that hold its last lines.
constexpr std::streamoff kTail = 8192;
constexpr std::size_t kLastLines = 20;

bool contains(Streams streams, Stream stream) {
  const auto bit = static_cast<int>(stream == Stream::kOutput ? Streams::kOutput : Streams::kError);
  return (static_cast<int>(streams) & bit) != 0;
}

std::int64_t now_in_microseconds() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

std::vector<std::string> end_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  const std::streamoff size = file.tellg();
  file.seekg(std::max<std::streamoff>(0, size - kTail));
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (text.ends_with('\n')) text.pop_back();
  if (text.empty()) return {};
  auto lines = split(text, '\n');
  // The first line may be incomplete.
  if (size > kTail && lines.size() > 1) lines.erase(lines.begin());
  if (lines.size() > kLastLines) lines.erase(lines.begin(), lines.end() - kLastLines);
  return lines;
}

}  // namespace

Workers::Workers(const LaunchPlan& plan, Console& console, const LogFolder& logs,
                 CleanupProcess& cleanup)
    : plan_(plan),
      console_(console),
      logs_(logs),
      cleanup_(cleanup),
      processes_([&console](std::size_t index, Stream stream,
                            std::string_view bytes) { console.bytes(index, stream, bytes); },
                 ProcessSet::Pieces::kBytes) {}

Workers::~Workers() {
  // The process set kills the running workers, so the cleanup process need not.
  for (std::size_t i = 0; i < processes_.size(); ++i) cleanup_.forget_group(processes_.pid(i));
  console_.clear();
}

void Workers::start(const LaunchRound& round, const StoreFacts& store) {
  for (int local_rank = 0; local_rank < plan_.agent.nproc_per_node; ++local_rank) {
    spawn(round, store, local_rank);
  }
}

std::vector<std::string> Workers::environment_of(const Place& place, const LaunchRound& round,
                                                 const StoreFacts& store) const {
  std::vector<std::pair<std::string, std::optional<std::string>>> changes;
  // Variables of another launcher that started this one.
  for (const char* stale :
       {"ACCELERATE_MASTER_LISTEN_FD", "ACCELERATE_DEBUG_RDV_FILE", "FORK_LAUNCHED"}) {
    changes.emplace_back(stale, std::nullopt);
  }
  for (const auto& [name, value] : plan_.variables) changes.emplace_back(name, value);
  for (const auto& [name, value] : worker_variables(plan_.agent, round, place.local_rank,
                                                    store.agent_store, Environment::process())) {
    changes.emplace_back(name, value);
  }
  changes.emplace_back("MASTER_PORT", str(store.port));
  changes.emplace_back("TORCHELASTIC_ERROR_FILE", place.error_file.string());
  if (place.rank == 0 && store.listen_fd >= 0) {
    changes.emplace_back("ACCELERATE_MASTER_LISTEN_FD", str(store.listen_fd));
  }
  return environment_with(changes);
}

std::string Workers::prefix(int rank, int local_rank) const {
  auto pattern = plan_.agent.log_line_prefix_template.value_or(kDefaultPrefix);
  return fill_prefix_template(pattern, plan_.agent.role, rank, local_rank);
}

void Workers::route(SpawnOptions& options, const LaunchRound& round, Place& place,
                    std::size_t index) {
  const auto& specs = plan_.agent.logs;
  const auto tee = specs.tee.of(place.local_rank);
  const auto redirect = specs.redirects.of(place.local_rank);
  const auto& filter = specs.local_ranks_filter;
  const bool shown = filter.empty() || std::ranges::find(filter, place.local_rank) != filter.end();
  std::filesystem::path folder;
  if (tee != Streams::kNone || redirect != Streams::kNone) {
    folder = logs_.make_for_worker(round.restart_count, place.local_rank);
  }
  Console::Route routes[2];
  for (const auto stream : {Stream::kOutput, Stream::kError}) {
    const bool out = stream == Stream::kOutput;
    auto& target = out ? options.output : options.error;
    auto& route = routes[out ? 0 : 1];
    const auto file = folder / (out ? "stdout.log" : "stderr.log");
    if (contains(redirect, stream) && !contains(tee, stream)) {
      target = StreamTarget::kFile;
      (out ? options.output_file : options.error_file) = file;
      (out ? place.output_only_in : place.error_only_in) = file;
      continue;
    }
    target = StreamTarget::kPipe;
    route.shown = shown;
    if (contains(tee, stream)) route.file = file;
    // A template that the user gives is for all ranks; without one rank 0 is shown as it is.
    const bool with_prefix =
        place.rank != 0 || plan_.agent.log_line_prefix_template || contains(tee, stream);
    if (with_prefix) {
      route.prefix = prefix(place.rank, place.local_rank);
    } else if (shown && console_.terminal(stream)) {
      target = StreamTarget::kTerminal;
    }
  }
  // On one screen both streams of the main worker go through one pipe and keep their order.
  const bool raw = !routes[0].prefix && !routes[1].prefix;
  if (raw && console_.one_screen() && options.output == options.error &&
      options.output != StreamTarget::kFile) {
    options.error = StreamTarget::kWithOutput;
  }
  console_.attach(index, routes[0], routes[1]);
}

void Workers::spawn(const LaunchRound& round, const StoreFacts& store, int local_rank) {
  const int rank = round.first_rank + local_rank;
  Place place{.rank = rank, .local_rank = local_rank};
  place.error_file = logs_.of_worker(round.restart_count, local_rank) / "error.json";
  // A round after a machine joined or left uses the same files: an old error must not be reported.
  std::error_code not_there;
  std::filesystem::remove(place.error_file, not_there);
  // Our `record` creates the folder when it has an error to write; Python's does not.
  if (!plan_.takes_listen_fd) (void)logs_.make_for_worker(round.restart_count, local_rank);

  SpawnOptions options;
  options.argv = worker_arguments(plan_.argv, local_rank);
  options.environment = environment_of(place, round, store);
  options.new_session = true;
  // Only the foreground group may read from a terminal; a worker that tries is stopped.
  options.no_input = rank != 0 || ::isatty(STDIN_FILENO) == 1;
  if (rank == 0 && store.listen_fd >= 0) options.inherit.push_back(store.listen_fd);
  route(options, round, place, processes_.size());
  options.announce_fd = cleanup_.group_fd();
  processes_.spawn(options);
  places_.push_back(std::move(place));
}

std::vector<std::string> Workers::last_lines(std::size_t index) const {
  const Place& place = places_[index];
  for (const auto& file : {place.error_only_in, place.output_only_in}) {
    if (file.empty()) continue;
    if (auto lines = end_of_file(file); !lines.empty()) return lines;
  }
  return console_.last_lines(index);
}

std::optional<WorkerFailure> Workers::failure_of(std::size_t index) {
  const ExitStatus& status = processes_.status(index);
  if (status.ok()) return std::nullopt;
  const Place& place = places_[index];
  WorkerFailure failure{.rank = place.rank,
                        .local_rank = place.local_rank,
                        .host = this_host_name(),
                        .pid = processes_.pid(index),
                        .status = status,
                        .time_us = now_in_microseconds(),
                        .last_lines = last_lines(index),
                        .terminated_by_launcher = ending_};
  if (read_error_file(place.error_file, failure) && logs_.temporary()) {
    failure.error_file.clear();  // the folder is removed at the end
  }
  return failure;
}

std::vector<WorkerFailure> Workers::wait(Clock::time_point deadline, std::span<pollfd> also) {
  processes_.listen(!console_.full());
  std::vector<WorkerFailure> failures;
  for (const auto index : processes_.wait(deadline, also)) {
    console_.ended(index);
    cleanup_.forget_group(processes_.pid(index));
    if (auto failure = failure_of(index)) failures.push_back(std::move(*failure));
  }
  return failures;
}

void Workers::signal(int signal) noexcept { processes_.signal_all(signal); }

void Workers::set_terminal_size() noexcept {
  winsize size{};
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    if (::ioctl(fd, TIOCGWINSZ, &size) != 0) continue;
    processes_.set_terminal_size(size.ws_row, size.ws_col);
    return;
  }
}

}  // namespace accelerate::detail::launch
