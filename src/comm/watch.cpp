#include "comm/watch.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "comm/shared_page.h"
#include "comm/watch_hub.h"
#include "comm/watch_notes.h"
#include "core/processes.h"
#include "core/sockets.h"
#include "core/text.h"
#include "core/world.h"

namespace accelerate::detail {

std::string WatchOptions::place_of(int of_rank) const {
  if (global_ranks.empty()) return "";
  return str(", rank ", global_ranks.at(static_cast<std::size_t>(of_rank)), " of the run");
}

namespace {

using Clock = std::chrono::steady_clock;
using Kind = Note::Kind;
using std::chrono::milliseconds;

// How long a farewell may take to be handed to the system.
constexpr auto kTimeForFarewell = milliseconds(200);
// Our own loop was late by so much: we were stopped, or the machine slept.
constexpr auto kLate = std::chrono::seconds(1);

std::string random_password() {
  std::random_device device;
  return str(std::hex, device(), device(), device(), device());
}

}  // namespace

class Watch::Loop {
 public:
  Loop(const WatchOptions& options, const Blackboard& blackboard,
       std::function<void(const Finding&)> on_finding,
       std::function<void(const std::string&)> on_notice)
      : options_(options),
        on_finding_(std::move(on_finding)),
        on_notice_(std::move(on_notice)),
        log_(page_.get()),
        bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    connect(blackboard);
    start_thread();
  }

  ~Loop() {
    if (pid_ != ::getpid()) {  // a forked copy: the thread is not here
      thread_.detach();
      return;
    }
    farewell();
    stop_ = true;
    ring();
    thread_.join();
  }

  CallLog& log() noexcept { return log_; }

  void farewell() noexcept {
    try {
      say_last({.kind = Kind::kLeft, .call = log_.latest()});
    } catch (...) {  // NOLINT(bugprone-empty-catch): others will find that we are gone
    }
  }

  void threw(const std::string& message) noexcept {
    try {
      say_last({.kind = Kind::kThrew, .call = log_.latest(), .text = message});
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
  }

  void transport_failed(const Ticket& ticket, const std::string& message) {
    say({.kind = Kind::kTransport, .call = log_.tell(ticket.sequence), .text = message});
  }

  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }

  std::optional<Finding> finding(milliseconds patience) const {
    std::unique_lock lock(mutex_);
    found_.wait_for(lock, patience, [&] { return finding_.has_value(); });
    return finding_;
  }

 private:
  // -- Start ------------------------------------------------------------------------------------

  void connect(const Blackboard& blackboard) {
    const auto now = Clock::now();
    if (options_.rank == 0) {
      std::string error;
      auto door = listen_on(0, is_loopback(options_.address), error);
      if (!door) throw CommError(str("rank 0 cannot open a port for the watch: ", error, "."), 0);
      const auto password = random_password();
      const auto address = options_.address.empty() ? this_host_name() : options_.address;
      blackboard.set("watch", str(address, " ", port_of(*door), " ", password, " ", host_identity(),
                                  " ", ::getpid(), " ", this_host_name(), " ", page_.path()));
      hub_.emplace(std::move(*door), password, options_.size, options_.times, options_.beat, now);
      link_.emplace(hub_->own_channel(now));
      return say_hello(password);
    }
    const auto words = split(blackboard.get("watch"), ' ');
    if (words.size() != 7) throw CommError("the watch of rank 0 gave no address.", 0);
    hub_is_here_ = words[3] == host_identity();
    hub_pid_ = std::stoi(words[4]);
    hub_name_ = str("rank 0 (", words[5], options_.place_of(0), ")");
    if (hub_is_here_) hub_page_ = open_page(words[6]);
    link_.emplace(reach(words[0], std::stoi(words[1])), now);
    say_hello(words[2]);
  }

  Descriptor reach(const std::string& address, int port) const {
    const auto until =
        Clock::now() + std::min<milliseconds>(options_.timeout, milliseconds(60'000));
    std::string error = "no answer";
    while (Clock::now() < until) {
      if (auto socket = connect_to(address, port, milliseconds(2000), error)) {
        return std::move(*socket);
      }
      std::this_thread::sleep_for(milliseconds(20));
    }
    throw CommError(str("the watch of rank 0 cannot be reached at ", address, ":", port, ": ",
                        error, ". Is a firewall between?"),
                    0);
  }

  void say_hello(const std::string& password) {
    Note hello{.kind = Kind::kHello,
               .rank = options_.rank,
               .pid = ::getpid(),
               .host = host_identity(),
               .name = str(this_host_name(), options_.place_of(options_.rank)),
               .page = page_.path(),
               .text = password};
    link_->send(to_line(hello));
  }

  /// Signals are the program's business: none is delivered to the side thread.
  void start_thread() {
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before);
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // -- The side thread --------------------------------------------------------------------------

  void run() {
    ::pthread_setname_np(::pthread_self(), "rank watch");  // for those who look at threads
    auto last_look = Clock::now();
    while (!stop_ || !flushed()) {
      std::vector<pollfd> fds{{.fd = bell_.get(), .events = POLLIN, .revents = 0}, link_->wants()};
      if (hub_) hub_->wants(fds);
      ::poll(fds.data(), fds.size(), static_cast<int>(options_.stall.count()));
      std::uint64_t rung = 0;
      (void)!::read(bell_.get(), &rung, sizeof rung);
      const auto now = Clock::now();
      if (now - last_look > options_.stall + kLate) forgive(now);
      last_look = now;
      send_queued();
      tell_if_waiting(now);
      if (hub_) {
        if (auto notice = hub_->work(now)) on_notice_(*notice);
      }
      for (const auto& line : link_->exchange(now)) {
        if (const auto note = note_from_line(line)) hear(*note);
      }
      judge_hub(now);
      if (now - link_->last_said() >= options_.beat) {
        link_->send(to_line({.kind = Kind::kBeat, .call = log_.latest()}));
      }
      if (stop_ && now > stop_by()) return;
    }
  }

  [[nodiscard]] bool flushed() {
    const std::scoped_lock lock(mutex_);
    const bool hub_done = !hub_ || (hub_left_said_ && hub_->idle());
    return queue_.empty() && (link_->idle() || link_->closed()) && hub_done;
  }

  Clock::time_point stop_by() {
    if (!stop_by_) stop_by_ = Clock::now() + kTimeForFarewell;
    return *stop_by_;
  }

  void forgive(Clock::time_point now) {
    link_->forgive(now);
    if (hub_) hub_->forgive(now);
  }

  void send_queued() {
    std::vector<Note> notes;
    {
      const std::scoped_lock lock(mutex_);
      notes.swap(queue_);
    }
    for (const auto& note : notes) {
      link_->send(to_line(note));
      if (note.kind == Kind::kTransport) transport_broken_ = true;
      const bool ends = note.kind == Kind::kLeft || note.kind == Kind::kThrew;
      if (!ends || !hub_) continue;
      // Rank 0 is the hub: it hears itself first, then tells the others.
      if (auto notice = hub_->work(Clock::now())) on_notice_(*notice);
      if (note.kind == Kind::kLeft) hub_->farewell(note.call);
      hub_left_said_ = true;
    }
    if (notes.empty()) return;
    const std::scoped_lock lock(mutex_);
    said_ += notes.size();
    found_.notify_all();
  }

  void tell_if_waiting(Clock::time_point now) {
    const auto call = log_.waiting(now - options_.stall);
    const auto sequence = call ? call->sequence : 0;
    if (sequence == told_) return;
    if (told_ != 0) link_->send(to_line({.kind = Kind::kMovesOn}));
    if (call) link_->send(to_line({.kind = Kind::kWaits, .call = *call}));
    told_ = sequence;
  }

  void hear(const Note& note) {
    switch (note.kind) {
      case Kind::kAsk:
        return link_->send(to_line({.kind = Kind::kTells, .call = log_.tell(note.call.sequence)}));
      case Kind::kLook: {
        const auto page = open_page(note.page);
        return link_->send(to_line({.kind = Kind::kSeen,
                                    .rank = note.rank,
                                    .call = page ? read_page(*page) : ToldCall{},
                                    .text = process_state(note.pid)}));
      }
      case Kind::kFinding:
        return decide({note.rank, note.text});
      case Kind::kBeat:
        if (note.call.sequence > 0) hub_told_ = note.call;
        return;
      case Kind::kLeft:
        hub_left_ = note.call;
        return;
      default:
        return;
    }
  }

  /// What only the others can find: that rank 0, where the jury sits, is the one that is missing.
  void judge_hub(Clock::time_point now) {
    if (failed() || options_.rank == 0) return;
    if (hub_left_) {
      const auto call = log_.waiting(now - options_.stall);
      if (!call) return;
      const bool same = call->sequence == hub_left_->sequence;
      if (same && call->signature != hub_left_->signature) {
        return decide({-1, str("the ranks are in different collectives:\n  ", hub_name_, ": ",
                               hub_left_->text, "\n  ", own_name(), ": ", call->text)});
      }
      // Where rank 0 has completed it, somebody else may be late for it. If there is nobody else,
      // calls of different sizes have met on a device.
      const bool completed = call->sequence < hub_left_->open && !transport_broken_;
      const bool misfit = options_.size == 2 && log_.waiting(now - options_.times.silence);
      if (completed && !misfit) return;
      return decide({0, str(hub_name_, " has ended", where(*hub_left_), ", and ", own_name(),
                            " waits in ", call->text)});
    }
    if (link_->closed()) {
      if (hub_is_missed(now)) decide({0, str(hub_name_, " died", where_hub_is())});
      return;
    }
    const auto silence = now - link_->last_heard();
    if (silence <= options_.times.silence) return;
    const auto state = hub_is_here_ ? str(" (the process is ", process_state(hub_pid_), ")") : "";
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(silence).count();
    decide({0, str(hub_name_, " has given no sign of life for ", seconds, " s", state, ",",
                   where_hub_is())});
  }

  /// Somebody waits here in a collective that rank 0 had not completed when it died.
  [[nodiscard]] bool hub_is_missed(Clock::time_point now) const {
    if (transport_broken_) return true;
    const auto call = log_.waiting(now - options_.stall);
    if (!call || !hub_page_) return call.has_value();
    const auto last = read_page(*hub_page_);
    return last.open <= call->sequence;
  }

  static std::string where(const ToldCall& last) {
    if (last.sequence == 0) return " before its first collective";
    return str(last.complete ? " after " : " in ", last.text);
  }

  [[nodiscard]] std::string own_name() const {
    return str("rank ", options_.rank, " (", this_host_name(), options_.place_of(options_.rank),
               ")");
  }

  /// Exact on the host of rank 0. Elsewhere it is what rank 0 said with its last beat, or the last
  /// call that this rank has completed: rank 0 had come to it as well.
  [[nodiscard]] std::string where_hub_is() const {
    if (hub_page_) return where(read_page(*hub_page_));
    const auto completed = log_.last_completed();
    const auto told = hub_told_.sequence + (hub_told_.complete ? 1 : 0);
    if (completed.sequence == 0 || completed.sequence < told) return where(hub_told_);
    return str(" in or after ", completed.text);
  }

  void decide(const Finding& finding) {
    {
      const std::scoped_lock lock(mutex_);
      if (finding_) return;
      finding_ = finding;
      failed_.store(true, std::memory_order_release);
    }
    found_.notify_all();
    on_finding_(finding);
  }

  // -- Other threads ----------------------------------------------------------------------------

  void ring() const noexcept {
    const std::uint64_t one = 1;
    (void)!::write(bell_.get(), &one, sizeof one);
  }

  std::uint64_t say(Note note) {
    std::uint64_t number = 0;
    {
      const std::scoped_lock lock(mutex_);
      queue_.push_back(std::move(note));
      number = said_ + queue_.size();
    }
    ring();
    return number;
  }

  /// The last word of this rank, once; returns when it is on its way.
  void say_last(Note note) {
    if (last_word_said_.exchange(true) || pid_ != ::getpid()) return;
    const auto number = say(std::move(note));
    std::unique_lock lock(mutex_);
    found_.wait_for(lock, kTimeForFarewell, [&] { return said_ >= number; });
  }

  const WatchOptions options_;
  const std::function<void(const Finding&)> on_finding_;
  const std::function<void(const std::string&)> on_notice_;
  const pid_t pid_ = ::getpid();
  SharedPage page_;
  CallLog log_;
  Descriptor bell_;
  std::optional<WatchHub> hub_;
  std::optional<LineChannel> link_;

  // Rank 0 as seen by the others.
  bool hub_is_here_ = false;
  int hub_pid_ = 0;
  std::string hub_name_;
  ToldCall hub_told_;
  std::shared_ptr<const CallPage> hub_page_;
  std::optional<ToldCall> hub_left_;

  std::uint64_t told_ = 0;
  bool transport_broken_ = false;
  bool hub_left_said_ = false;
  std::optional<Clock::time_point> stop_by_;

  mutable std::mutex mutex_;
  mutable std::condition_variable found_;
  std::vector<Note> queue_;
  std::uint64_t said_ = 0;
  std::optional<Finding> finding_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> last_word_said_{false};
  std::thread thread_;
};

Watch::Watch(const WatchOptions& options, const Blackboard& blackboard,
             std::function<void(const Finding&)> on_finding,
             std::function<void(const std::string&)> on_notice)
    : loop_(std::make_unique<Loop>(options, blackboard, std::move(on_finding),
                                   std::move(on_notice))) {}

Watch::~Watch() = default;

CallLog& Watch::log() noexcept { return loop_->log(); }
void Watch::farewell() noexcept { loop_->farewell(); }
void Watch::threw(const std::string& message) noexcept { loop_->threw(message); }
void Watch::transport_failed(const Ticket& ticket, const std::string& message) {
  loop_->transport_failed(ticket, message);
}
bool Watch::failed() const noexcept { return loop_->failed(); }
std::optional<Finding> Watch::finding(std::chrono::milliseconds patience) const {
  return loop_->finding(patience);
}

}  // namespace accelerate::detail
