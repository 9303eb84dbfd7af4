#include "launch/join.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = AgentMessage::Kind;
using std::chrono::milliseconds;

constexpr auto kOneTry = milliseconds(1000);
constexpr auto kLongestPause = milliseconds(500);
constexpr auto kTimeForWelcome = milliseconds(5000);
// When to report that we wait, and how often.
constexpr auto kFirstNotice = std::chrono::seconds(5);
constexpr auto kNextNotice = std::chrono::seconds(30);

class Joining {
 public:
  Joining(const LaunchConfig& config, const RendezvousConf& conf, SignalQueue& signals,
          Console& console)
      : config_(config),
        conf_(conf),
        signals_(signals),
        console_(console),
        started_(Clock::now()),
        notice_at_(started_ + kFirstNotice) {}

  Channel run(Member member) {
    for (auto pause = milliseconds(20);; pause = std::min(pause * 2, kLongestPause)) {
      if (auto socket = connect_to(config_.master_addr, config_.master_port, kOneTry, why_)) {
        if (config_.local_addr.empty()) member.address = own_address(*socket);
        Channel channel(std::move(*socket), Clock::now());
        channel.send({.kind = Kind::kHello, .member = member});
        if (welcomed(channel)) return channel;
        why_ =
            "the program that listens there is not a launcher that waits for machines: the job may "
            "have started already, or the port belongs to another program";
      }
      check_time();
      rest(pause);
    }
  }

 private:
  bool welcomed(Channel& channel) {
    const auto until = Clock::now() + kTimeForWelcome;
    bool nudged = false;
    while (Clock::now() < until && !channel.closed()) {
      // The store of workers that run already needs a second line to close the connection.
      if (!std::exchange(nudged, true)) {
        pollfd answer = channel.wants();
        if (::poll(&answer, 1, 300) == 0) channel.send({.kind = Kind::kAlive});
      }
      std::array<pollfd, 2> fds{channel.wants(), {signals_.fd(), POLLIN, 0}};
      ::poll(fds.data(), fds.size(), 200);
      leave_on_signal();
      const auto messages = channel.exchange(Clock::now());
      if (messages.empty()) continue;
      // What follows the welcome is for the agent.
      channel.put_back({messages.begin() + 1, messages.end()});
      return messages.front().kind == Kind::kWelcome;
    }
    return false;
  }

  void rest(milliseconds pause) {
    pollfd signal{.fd = signals_.fd(), .events = POLLIN, .revents = 0};
    ::poll(&signal, 1, static_cast<int>(pause.count()));
    leave_on_signal();
  }

  void leave_on_signal() {
    while (const auto signal = signals_.next()) {
      if (*signal == SIGTSTP) {
        ::raise(SIGSTOP);
      } else if (*signal != SIGCONT && *signal != SIGWINCH) {
        throw Interrupted{*signal};
      }
    }
  }

  void check_time() {
    const auto now = Clock::now();
    const auto tenths = std::chrono::round<std::chrono::duration<int, std::deci>>(now - started_);
    const auto tried = seconds_text(tenths);
    const auto where = str(config_.master_addr, ":", config_.master_port);
    if (now - started_ >= conf_.join_timeout) {
      throw Error(str("no launcher that leads this job answers at ", where, " (", why_,
                      "; tried for ", tried,
                      "). Check --main_process_ip and --main_process_port, that the ",
                      "launcher runs on machine 0, and that no firewall is between them."));
    }
    if (now < notice_at_) return;
    notice_at_ = now + kNextNotice;
    console_.say(str("accelerate: waiting for ", where, " since ", tried, " (", why_, ")"));
  }

  const LaunchConfig& config_;
  const RendezvousConf& conf_;
  SignalQueue& signals_;
  Console& console_;
  Clock::time_point started_;
  Clock::time_point notice_at_;
  std::string why_ = "no answer";
};

}  // namespace

Channel join_job(const LaunchConfig& config, Member member, const RendezvousConf& conf,
                 SignalQueue& signals, Console& console) {
  return Joining(config, conf, signals, console).run(std::move(member));
}

}  // namespace accelerate::detail::launch
