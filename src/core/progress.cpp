#include "accelerate/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <mutex>
#include <set>
#include <utility>

#include "accelerate/environment.h"
#include "core/log.h"
#include "core/progress_line.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate {
namespace {

// A log file gets a line this often, and not ten a second.
constexpr double kSecondsBetweenPlainLines = 10;

// The coarse clock is read in a few nanoseconds, so every step can afford it, and a bar needs no
// thread that looks after it when steps become slow.
double now_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

bool locale_is_utf8() {
  const auto environment = Environment::process();
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const auto value = environment.get(name);
    if (!value) continue;
    const std::string text = detail::to_lower(*value);
    return text.find("utf-8") != std::string::npos || text.find("utf8") != std::string::npos;
  }
  return false;
}

// One column is left free: a line that fills the terminal would move the cursor to the next.
std::optional<int> terminal_columns() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 2) return std::nullopt;
  return size.ws_col - 1;
}

// A bar may be made before the state is; the launcher's variables then say which process this is.
int local_index() {
  if (const auto process = detail::log_process()) return process->local_rank;
  return static_cast<int>(
      Environment::process().integer({"LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"},
                                     0));
}

// The lines that open bars stand on, counted from the top one.
struct Lines {
  std::mutex mutex;
  std::set<int> taken;

  int take() {
    int line = 0;
    while (taken.contains(line)) ++line;
    taken.insert(line);
    return line;
  }
};

Lines& lines() {
  static auto* const instance = new Lines;  // outlives bars that are statics
  return *instance;
}

}  // namespace

struct ProgressBar::Impl {
  explicit Impl(TqdmOptions given)
      : options(std::move(given)),
        terminal(options.sink || ::isatty(STDERR_FILENO) == 1),
        ascii(options.ascii.value_or(!locale_is_utf8())),
        interval(terminal ? options.mininterval
                          : std::max(options.mininterval, kSecondsBetweenPlainLines)) {
    const std::scoped_lock lock(lines().mutex);
    line = lines().take();
  }

  ~Impl() {
    const std::scoped_lock lock(lines().mutex);
    lines().taken.erase(line);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void start(std::int64_t n) {
    started = last_draw = now_seconds();
    last_n = n;
    steps = seconds = detail::MovingAverage(options.smoothing);
    drawn_once = false;
  }

  [[nodiscard]] std::string text(std::int64_t n, std::optional<std::int64_t> total,
                                 bool average) const {
    std::optional<double> rate;
    if (!average && seconds.value() > 0) rate = steps.value() / seconds.value();
    auto columns = options.ncols;
    if (!columns && !options.sink && terminal) columns = terminal_columns();
    return detail::format_meter({.n = n,
                                 .total = total,
                                 .elapsed_seconds = now_seconds() - started,
                                 .ncols = columns,
                                 .prefix = options.desc,
                                 .ascii = ascii,
                                 .unit = options.unit,
                                 .unit_scale = options.unit_scale,
                                 .rate = rate,
                                 .postfix = options.postfix,
                                 .unit_divisor = options.unit_divisor,
                                 .initial = options.initial});
  }

  void write(std::string_view bytes) const {
    if (options.sink) {
      options.sink(bytes);
    } else {
      detail::write_fully(STDERR_FILENO, bytes);
    }
  }

  // Redraws line number `at` and comes back; blanks cover what the last text had more.
  void draw_at(int at, const std::string& text, std::string_view then = {}) {
    const int width = detail::display_width(text);
    std::string bytes(static_cast<std::size_t>(at), '\n');
    bytes += '\r';
    bytes += text;
    bytes.append(static_cast<std::size_t>(std::max(0, last_width - width)), ' ');
    for (int i = 0; i < at; ++i) bytes += "\x1b[A";
    bytes += then;
    last_width = width;
    const std::scoped_lock lock(lines().mutex);
    write(bytes);
  }

  void draw(const std::string& text) {
    drawn_once = true;
    if (terminal) {
      draw_at(line, text);
    } else {
      const std::scoped_lock lock(lines().mutex);
      write(text + "\n");
    }
  }

  // The last line takes the place of the topmost bar, which is drawn again below it.
  void finish(const std::string& text) {
    if (!terminal) {
      if (options.leave) draw(text);
    } else if (options.leave) {
      draw_at(0, text, "\n");
    } else if (drawn_once) {
      draw_at(line, "", line == 0 ? "\r" : "");
    }
  }

  TqdmOptions options;
  bool terminal;
  bool ascii;
  double interval;
  int line = 0;
  int last_width = 0;
  double started = 0;
  double last_draw = 0;
  std::int64_t last_n = 0;
  bool drawn_once = false;
  detail::MovingAverage steps{0.3};
  detail::MovingAverage seconds{0.3};
};

ProgressBar::ProgressBar(TqdmOptions options) : n_(options.initial), total_(options.total) {
  if (options.disable || (options.main_process_only && local_index() != 0)) return;
  if (!parse_flag_from_env("ACCELERATE_PROGRESS", /*fallback=*/true)) return;
  impl_ = std::make_unique<Impl>(std::move(options));
  impl_->start(n_);
  if (impl_->terminal) refresh();
}

ProgressBar::~ProgressBar() { close(); }

ProgressBar::ProgressBar(ProgressBar&& other) noexcept = default;

ProgressBar& ProgressBar::operator=(ProgressBar&& other) noexcept {
  if (this != &other) {
    close();
    n_ = other.n_;
    total_ = other.total_;
    impl_ = std::move(other.impl_);
  }
  return *this;
}

void ProgressBar::draw_if_due() {
  const double now = now_seconds();
  const double passed = now - impl_->last_draw;
  if (passed < impl_->interval) return;
  if (passed > 0 && n_ != impl_->last_n) {
    impl_->steps.add(static_cast<double>(n_ - impl_->last_n));
    impl_->seconds.add(passed);
  }
  impl_->last_draw = now;
  impl_->last_n = n_;
  refresh();
}

void ProgressBar::refresh() {
  if (impl_) impl_->draw(impl_->text(n_, total_, /*average=*/false));
}

void ProgressBar::set_description(const std::string& desc) {
  if (!impl_) return;
  impl_->options.desc = desc;
  if (impl_->terminal) refresh();
}

void ProgressBar::set_postfix(const std::vector<std::pair<std::string, PostfixValue>>& values) {
  if (impl_) set_postfix_str(detail::format_postfix(values));
}

void ProgressBar::set_postfix_str(const std::string& text) {
  if (!impl_) return;
  impl_->options.postfix = text;
  // Loops set it at every step: a drawing each time would cost more than the step.
  draw_if_due();
}

void ProgressBar::reset(std::optional<std::int64_t> total) {
  n_ = 0;
  if (total) total_ = total;
  if (!impl_) return;
  impl_->options.initial = 0;
  impl_->start(n_);
  if (impl_->terminal) refresh();
}

void ProgressBar::close() noexcept {
  if (!impl_) return;
  // Runs while exceptions unwind too: a bar that cannot be drawn is no reason to end the program.
  try {
    impl_->finish(impl_->text(n_, total_, /*average=*/true));
  } catch (...) {
  }
  impl_.reset();
}

std::optional<std::int64_t> ProgressBar::total() const noexcept { return total_; }

}  // namespace accelerate
