#include "commands/monitor/runs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "accelerate/errors.h"
#include "core/descriptor.h"
#include "core/numbers.h"
#include "core/text.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;

constexpr auto kBetweenDiscoveries = std::chrono::seconds(2);
constexpr auto kCheckpointsStayFor = std::chrono::seconds(3);
constexpr int kDeepest = 6;
// A folder with more than this holds data: the rest of it is left out.
constexpr int kMostEntries = 5'000;
constexpr std::size_t kMostLogs = 50;
constexpr std::size_t kChunk = 1 << 20;
constexpr std::size_t kTailBytes = 64 << 10;

/// "rank_3.jsonl" -> 3.
std::optional<int> rank_of(const std::string& file) {
  constexpr std::string_view kStart = "rank_";
  constexpr std::string_view kEnd = ".jsonl";
  if (!file.starts_with(kStart) || !file.ends_with(kEnd)) return std::nullopt;
  const auto digits = std::string_view(file).substr(
      kStart.size(), file.size() - std::min(file.size(), kStart.size() + kEnd.size()));
  const auto rank = is_digits(digits) ? parse_number<int>(digits) : std::nullopt;
  return rank && *rank <= 1'000'000 ? rank : std::nullopt;
}

/// "20261116-133246-5f3a" -> "11-16 13:32:46"; "" for another name.
std::string started_text_of(const std::string& name) {
  std::array<int, 5> part{};
  int year = 0;
  int length = 0;
  const int found = std::sscanf(name.c_str(), "%4d%2d%2d-%2d%2d%2d-%n", &year, &part[0], &part[1],
                                &part[2], &part[3], &part[4], &length);
  if (found != 6 || length != 16) return "";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%02d-%02d %02d:%02d:%02d", part[0], part[1], part[2],
                part[3], part[4]);
  return text.data();
}

}  // namespace

/// A file of a run, and how far it was read.
struct RunSet::Source {
  fs::path path;
  Run* run = nullptr;
  int rank = 0;
  std::uint64_t offset = 0;
  std::string partial = {};  ///< a line whose end is not there yet
  bool skipping = false;     ///< inside of a line that is too long

  void take(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto end = bytes.find('\n');
      const auto piece = bytes.substr(0, end);
      if (partial.size() + piece.size() > kLongestLine) skipping = true;
      if (!skipping) partial += piece;
      if (end == bytes.npos) return;
      if (!skipping) run->add_line(rank, partial);
      partial.clear();
      skipping = false;
      bytes.remove_prefix(end + 1);
    }
  }
};

RunSet::RunSet(fs::path folder) : folder_(std::move(folder)) {
  require_existing(folder_);
  if (!fs::is_directory(folder_)) {
    throw ConfigError(str("'", folder_.string(),
                          "' is not a folder. Name the folder of a project, "
                          "or one with several of them."));
  }
}

RunSet::~RunSet() = default;

Run& RunSet::run_of(const fs::path& folder) {
  auto& run = runs_[folder];
  if (run) return *run;
  run = std::make_unique<Run>();
  run->id = static_cast<int>(runs_.size()) - 1;
  run->folder = folder;
  run->started_text = started_text_of(folder.filename().string());
  const auto absolute = fs::weakly_canonical(folder);
  const bool recorded = absolute.parent_path().filename() == "monitor";
  run->project = recorded ? absolute.parent_path().parent_path() : absolute;
  const auto relative = run->project.lexically_relative(fs::weakly_canonical(folder_));
  const auto name = relative.generic_string();
  // A run above the folder, as with `accelerate monitor runs/a/monitor`, goes by its own name.
  run->path_name = name == "." || name.starts_with("..") ? run->project.filename().string() : name;
  return *run;
}

void RunSet::look_at(const fs::path& file, std::set<fs::path>& trackers) {
  const auto name = file.filename().string();
  if (name.ends_with(".log")) {
    logs_.push_back(file);
  } else if (name == "metrics.jsonl") {
    trackers.insert(file);
  } else if (const auto rank = rank_of(name); rank && !sources_.contains(file)) {
    sources_[file] = std::make_unique<Source>(
        Source{.path = file, .run = &run_of(file.parent_path()), .rank = *rank});
  }
}

void RunSet::discover() {
  logs_.clear();
  std::set<fs::path> trackers;
  std::error_code error;
  std::vector<std::pair<fs::path, int>> folders{{folder_, 0}};
  while (!folders.empty()) {
    const auto [folder, depth] = std::move(folders.back());
    folders.pop_back();
    int entries = 0;
    for (fs::directory_iterator it(folder, error);
         !error && it != fs::directory_iterator() && ++entries < kMostEntries;
         it.increment(error)) {
      std::error_code gone;
      const auto name = it->path().filename().string();
      if (it->is_regular_file(gone)) {
        look_at(it->path(), trackers);
      } else if (it->is_directory(gone) && !it->is_symlink(gone) && depth < kDeepest &&
                 !name.starts_with('.') && name != "checkpoints") {
        folders.emplace_back(it->path(), depth + 1);
      }
    }
  }
  // A run that records itself has the values of its trackers too.
  for (const auto& file : trackers) {
    const auto folder = file.parent_path();
    if (fs::exists(folder / "monitor", error) ||
        fs::exists(folder.parent_path() / "monitor", error))
      continue;
    if (sources_.contains(file)) continue;
    sources_[file] = std::make_unique<Source>(Source{.path = file, .run = &run_of(folder)});
  }
  std::vector<std::pair<fs::file_time_type, fs::path>> by_time;
  for (auto& log : logs_) by_time.emplace_back(fs::last_write_time(log, error), std::move(log));
  std::ranges::sort(by_time, std::greater());
  if (by_time.size() > kMostLogs) by_time.resize(kMostLogs);
  logs_.clear();
  for (auto& [time, log] : by_time) logs_.push_back(std::move(log));
}

/// False if there was nothing to read.
bool RunSet::read_some(Source& source) {
  const Descriptor file(
      ::open(source.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file) return false;
  struct stat facts{};
  if (::fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  const auto size = static_cast<std::uint64_t>(facts.st_size);
  bytes_known_ += size - std::min(size, source.offset);
  // What shrinks was replaced; its old content stays.
  if (size < source.offset) {
    source.offset = 0;
    source.partial.clear();
    source.skipping = false;
  }
  if (size == source.offset) return false;
  std::string bytes(std::min<std::uint64_t>(size - source.offset, kChunk), '\0');
  const auto count =
      ::pread(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(source.offset));
  if (count <= 0) return false;
  source.offset += static_cast<std::uint64_t>(count);
  bytes_read_ += static_cast<std::uint64_t>(count);
  source.take(std::string_view(bytes).substr(0, static_cast<std::size_t>(count)));
  return true;
}

void RunSet::refresh(std::chrono::milliseconds limit) {
  const auto end = Clock::now() + limit;
  if (Clock::now() >= next_discovery_) {
    discover();
    next_discovery_ = Clock::now() + kBetweenDiscoveries;
  }
  bool more = false;
  do {
    more = false;
    bytes_known_ = bytes_read_;
    for (const auto& [path, source] : sources_) more = read_some(*source) || more;
  } while (more && Clock::now() < end);
}

void RunSet::refresh_all() {
  next_discovery_ = {};
  do {
    refresh(std::chrono::milliseconds(100));
  } while (bytes_read_ < bytes_known_);
}

std::vector<const Run*> RunSet::runs() const {
  std::vector<const Run*> all;
  for (const auto& [folder, run] : runs_) all.push_back(run.get());
  std::ranges::sort(all, std::greater(),
                    [](const Run* run) { return std::pair(run->started, run->id); });
  return all;
}

const CheckpointList& RunSet::checkpoints(const Run& run) {
  auto& listed = checkpoints_[run.project];
  if (Clock::now() < listed.until) return listed.list;
  listed.list = {};
  for (const auto& project : {run.project, run.project.parent_path()}) {
    std::error_code error;
    if (!fs::is_directory(project / "checkpoints", error)) continue;
    try {
      listed.list = list_checkpoints(project);
      break;
    } catch (const std::exception&) {
      continue;  // none, or they are being rotated
    }
  }
  listed.until = Clock::now() + kCheckpointsStayFor;
  return listed.list;
}

std::vector<std::string> RunSet::tail(const fs::path& log, std::size_t lines) {
  const Descriptor file(::open(log.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat facts{};
  if (!file || ::fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return {};
  const auto size = static_cast<std::size_t>(facts.st_size);
  std::string bytes(std::min(size, kTailBytes), '\0');
  const auto start = static_cast<off_t>(size - bytes.size());
  const auto count = ::pread(file.get(), bytes.data(), bytes.size(), start);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  auto found = split(bytes, '\n');
  if (start > 0 && found.size() > 1) found.erase(found.begin());  // it may be cut
  if (!found.empty() && found.back().empty()) found.pop_back();
  if (found.size() > lines) found.erase(found.begin(), found.end() - static_cast<long>(lines));
  for (auto& line : found) line = launch::printable_line(line);
  return found;
}

}  // namespace accelerate::detail::commands
