#include "comm/side_channel.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "comm/shared_page.h"
#include "comm/side_channel_messages.h"
#include "comm/side_channel_server.h"
#include "core/processes.h"
#include "core/signals_blocked.h"
#include "core/sockets.h"
#include "core/text.h"
#include "core/world.h"

namespace accelerate::detail::comm {

std::string SideChannelOptions::place_of(int of_rank) const {
  if (global_ranks.empty()) return "";
  return str(", rank ", global_ranks.at(static_cast<std::size_t>(of_rank)), " of the run");
}

namespace {

using Clock = std::chrono::steady_clock;
using Kind = SideChannelMessage::Kind;
using std::chrono::milliseconds;

// How long sending the farewell may take.
constexpr auto kTimeForFarewell = milliseconds(200);
// If our own loop is late by more than this, the process was stopped, or the machine slept.
constexpr auto kLate = std::chrono::seconds(1);

std::string random_password() {
  std::random_device device;
  return str(std::hex, device(), device(), device(), device());
}

}  // namespace

/// Shared with its thread, so that it stays where a callback on that thread ends the channel.
class SideChannel::Loop : public std::enable_shared_from_this<Loop> {
 public:
  Loop(const SideChannelOptions& options, const Blackboard& blackboard,
       std::function<void(const Finding&)> on_finding,
       std::function<void(const std::string&)> on_notice)
      : options_(options),
        on_finding_(std::move(on_finding)),
        on_notice_(std::move(on_notice)),
        log_(page_.get()),
        bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    connect(blackboard);
  }

  void start_thread() {
    const SignalsBlocked blocked;
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }

  void end() noexcept {
    if (stop_) return;
    if (owner_.is_forked_copy()) {  // the thread is not here
      stop_ = true;
      thread_.detach();
      return;
    }
    farewell();
    stop_ = true;
    ring();
    // The thread cancels calls, of which the last may own the group and with it this channel.
    on_side_thread() ? thread_.detach() : thread_.join();
  }

  CallLog& log() noexcept { return log_; }

  void farewell() noexcept {
    try {
      send_last({.kind = Kind::kLeft, .call = log_.latest()});
    } catch (...) {  // NOLINT(bugprone-empty-catch): the others notice the closed connection
    }
  }

  void threw(const std::string& message) noexcept {
    try {
      send_last({.kind = Kind::kThrew, .call = log_.latest(), .text = message});
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
  }

  void transport_failed(const Ticket& ticket, const std::string& message) {
    queue({.kind = Kind::kTransport, .call = log_.report(ticket.sequence), .text = message});
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
      if (!door)
        throw CommError(str("rank 0 cannot open a port for the side channel: ", error, "."), 0);
      const auto password = random_password();
      const auto address = options_.address.empty() ? this_host_name() : options_.address;
      blackboard.set("side_channel",
                     str(address, " ", port_of(*door), " ", password, " ", host_identity(), " ",
                         ::getpid(), " ", this_host_name(), " ", page_.path()));
      server_.emplace(std::move(*door), password, options_.size, options_.times, options_.beat,
                      now);
      link_.emplace(server_->own_channel(now));
      return send_hello(password);
    }
    const auto words = split(blackboard.get("side_channel"), ' ');
    if (words.size() != 7) throw CommError("the side channel of rank 0 gave no address.", 0);
    server_is_here_ = words[3] == host_identity();
    server_pid_ = std::stoi(words[4]);
    server_name_ = str("rank 0 (", words[5], options_.place_of(0), ")");
    if (server_is_here_) server_page_ = open_page(words[6]);
    link_.emplace(reach(words[0], std::stoi(words[1])), now);
    send_hello(words[2]);
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
    throw CommError(str("the side channel of rank 0 cannot be reached at ", address, ":", port,
                        ": ", error, ". Is a firewall between?"),
                    0);
  }

  void send_hello(const std::string& password) {
    SideChannelMessage hello{.kind = Kind::kHello,
                             .rank = options_.rank,
                             .pid = ::getpid(),
                             .host = host_identity(),
                             .name = str(this_host_name(), options_.place_of(options_.rank)),
                             .page = page_.path(),
                             .text = password};
    link_->send(to_line(hello));
  }

  // -- The side thread --------------------------------------------------------------------------

  void run() {
    side_thread_ = std::this_thread::get_id();
    ::pthread_setname_np(::pthread_self(), "side channel");  // shown by debuggers
    auto last_look = Clock::now();
    while (!stop_ || !flushed()) {
      std::vector<pollfd> fds{{.fd = bell_.get(), .events = POLLIN, .revents = 0}, link_->wants()};
      if (server_) server_->wants(fds);
      ::poll(fds.data(), fds.size(), static_cast<int>(options_.stall.count()));
      std::uint64_t rung = 0;
      (void)!::read(bell_.get(), &rung, sizeof rung);
      const auto now = Clock::now();
      if (now - last_look > options_.stall + kLate) forgive(now);
      last_look = now;
      send_queued();
      report_if_waiting(now);
      if (server_) {
        if (auto notice = server_->work(now)) on_notice_(*notice);
      }
      for (const auto& line : link_->exchange(now)) {
        if (const auto message = message_from_line(line)) hear(*message);
      }
      check_server(now);
      if (now - link_->last_said() >= options_.beat) {
        link_->send(to_line({.kind = Kind::kBeat, .call = log_.latest()}));
      }
      if (stop_ && now > stop_by()) return;
    }
  }

  [[nodiscard]] bool flushed() {
    const std::scoped_lock lock(mutex_);
    const bool server_done = !server_ || (server_farewell_sent_ && server_->idle());
    return queue_.empty() && (link_->idle() || link_->closed()) && server_done;
  }

  Clock::time_point stop_by() {
    if (!stop_by_) stop_by_ = Clock::now() + kTimeForFarewell;
    return *stop_by_;
  }

  void forgive(Clock::time_point now) {
    link_->forgive(now);
    if (server_) server_->forgive(now);
  }

  void send_queued() {
    std::vector<SideChannelMessage> messages;
    {
      const std::scoped_lock lock(mutex_);
      messages.swap(queue_);
    }
    for (const auto& message : messages) {
      link_->send(to_line(message));
      if (message.kind == Kind::kTransport) transport_broken_ = true;
      const bool ends = message.kind == Kind::kLeft || message.kind == Kind::kThrew;
      if (!ends || !server_) continue;
      // Rank 0 serves the channel: it handles its own message first, then tells the others.
      if (auto notice = server_->work(Clock::now())) on_notice_(*notice);
      if (message.kind == Kind::kLeft) server_->farewell(message.call);
      server_farewell_sent_ = true;
    }
    if (messages.empty()) return;
    const std::scoped_lock lock(mutex_);
    sent_ += messages.size();
    found_.notify_all();
  }

  void report_if_waiting(Clock::time_point now) {
    const auto call = log_.waiting(now - options_.stall);
    const auto sequence = call ? call->sequence : 0;
    if (sequence == reported_) return;
    if (reported_ != 0) link_->send(to_line({.kind = Kind::kMovesOn}));
    if (call) link_->send(to_line({.kind = Kind::kWaits, .call = *call}));
    reported_ = sequence;
  }

  void hear(const SideChannelMessage& message) {
    switch (message.kind) {
      case Kind::kAsk:
        return link_->send(
            to_line({.kind = Kind::kReport, .call = log_.report(message.call.sequence)}));
      case Kind::kLook: {
        const auto page = open_page(message.page);
        return link_->send(to_line({.kind = Kind::kSeen,
                                    .rank = message.rank,
                                    .call = page ? read_page(*page) : ReportedCall{},
                                    .text = process_state(message.pid)}));
      }
      case Kind::kFinding:
        return decide({message.rank, message.text});
      case Kind::kBeat:
        if (message.call.sequence > 0) server_call_ = message.call;
        return;
      case Kind::kLeft:
        server_left_ = message.call;
        return;
      default:
        return;
    }
  }

  /// Finds that rank 0 itself is missing, which the desync detector there cannot.
  void check_server(Clock::time_point now) {
    if (failed() || options_.rank == 0) return;
    if (server_left_) {
      const auto call = log_.waiting(now - options_.stall);
      if (!call) return;
      const bool same = call->sequence == server_left_->sequence;
      if (same && call->signature != server_left_->signature) {
        return decide({-1, str("the ranks are in different collectives:\n  ", server_name_, ": ",
                               server_left_->text, "\n  ", own_name(), ": ", call->text)});
      }
      // If rank 0 has completed the call, another rank may be late for it. If there is no other
      // rank, calls of different sizes have met on a device.
      const bool completed = call->sequence < server_left_->open && !transport_broken_;
      const bool misfit = options_.size == 2 && log_.waiting(now - options_.times.silence);
      if (completed && !misfit) return;
      return decide({0, str(server_name_, " has ended", where(*server_left_), ", and ", own_name(),
                            " waits in ", call->text)});
    }
    if (link_->closed()) {
      if (server_is_missed(now)) decide({0, str(server_name_, " died", where_server_is())});
      return;
    }
    const auto silence = now - link_->last_heard();
    if (silence <= options_.times.silence) return;
    const auto state =
        server_is_here_ ? str(" (the process is ", process_state(server_pid_), ")") : "";
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(silence).count();
    decide({0, str(server_name_, " has given no sign of life for ", seconds, " s", state, ",",
                   where_server_is())});
  }

  /// Whether this rank waits in a collective that rank 0 had not completed when it died.
  [[nodiscard]] bool server_is_missed(Clock::time_point now) const {
    if (transport_broken_) return true;
    const auto call = log_.waiting(now - options_.stall);
    if (!call || !server_page_) return call.has_value();
    const auto last = read_page(*server_page_);
    return last.open <= call->sequence;
  }

  static std::string where(const ReportedCall& last) {
    if (last.sequence == 0) return " before its first collective";
    return str(last.complete ? " after " : " in ", last.text);
  }

  [[nodiscard]] std::string own_name() const {
    return str("rank ", options_.rank, " (", this_host_name(), options_.place_of(options_.rank),
               ")");
  }

  /// Exact on the host of rank 0. Elsewhere it is what rank 0 reported with its last heartbeat, or
  /// the last call that this rank has completed: rank 0 had reached it as well.
  [[nodiscard]] std::string where_server_is() const {
    if (server_page_) return where(read_page(*server_page_));
    const auto completed = log_.last_completed();
    const auto told = server_call_.sequence + (server_call_.complete ? 1 : 0);
    if (completed.sequence == 0 || completed.sequence < told) return where(server_call_);
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

  [[nodiscard]] bool on_side_thread() const noexcept {
    return side_thread_ == std::this_thread::get_id();
  }

  void ring() const noexcept {
    const std::uint64_t one = 1;
    (void)!::write(bell_.get(), &one, sizeof one);
  }

  std::uint64_t queue(SideChannelMessage message) {
    std::uint64_t number = 0;
    {
      const std::scoped_lock lock(mutex_);
      queue_.push_back(std::move(message));
      number = sent_ + queue_.size();
    }
    ring();
    return number;
  }

  /// Sends the last message of this rank, once; returns when it has been sent.
  void send_last(SideChannelMessage message) {
    if (owner_.is_forked_copy() || last_message_sent_.exchange(true)) return;
    const auto number = queue(std::move(message));
    if (on_side_thread()) return;  // it sends when it is back in its loop
    std::unique_lock lock(mutex_);
    found_.wait_for(lock, kTimeForFarewell, [&] { return sent_ >= number; });
  }

  const SideChannelOptions options_;
  const std::function<void(const Finding&)> on_finding_;
  const std::function<void(const std::string&)> on_notice_;
  const OwnerProcess owner_;
  SharedPage page_;
  CallLog log_;
  Descriptor bell_;
  std::optional<SideChannelServer> server_;
  std::optional<LineChannel> link_;

  // Rank 0 as seen by the others.
  bool server_is_here_ = false;
  int server_pid_ = 0;
  std::string server_name_;
  ReportedCall server_call_;
  std::shared_ptr<const CallPage> server_page_;
  std::optional<ReportedCall> server_left_;

  std::uint64_t reported_ = 0;
  bool transport_broken_ = false;
  bool server_farewell_sent_ = false;
  std::optional<Clock::time_point> stop_by_;

  mutable std::mutex mutex_;
  mutable std::condition_variable found_;
  std::vector<SideChannelMessage> queue_;
  std::uint64_t sent_ = 0;
  std::optional<Finding> finding_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> last_message_sent_{false};
  std::atomic<std::thread::id> side_thread_{};
  std::thread thread_;
};

SideChannel::SideChannel(const SideChannelOptions& options, const Blackboard& blackboard,
                         std::function<void(const Finding&)> on_finding,
                         std::function<void(const std::string&)> on_notice)
    : loop_(std::make_shared<Loop>(options, blackboard, std::move(on_finding),
                                   std::move(on_notice))) {
  loop_->start_thread();
}

SideChannel::~SideChannel() { end(); }

void SideChannel::end() noexcept { loop_->end(); }

CallLog& SideChannel::log() noexcept { return loop_->log(); }
void SideChannel::farewell() noexcept { loop_->farewell(); }
void SideChannel::threw(const std::string& message) noexcept { loop_->threw(message); }
void SideChannel::transport_failed(const Ticket& ticket, const std::string& message) {
  loop_->transport_failed(ticket, message);
}
bool SideChannel::failed() const noexcept { return loop_->failed(); }
std::optional<Finding> SideChannel::finding(std::chrono::milliseconds patience) const {
  return loop_->finding(patience);
}

}  // namespace accelerate::detail::comm
