#include "launch/agent.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "core/world.h"
#include "launch/channel.h"
#include "launch/cleanup_process.h"
#include "launch/console.h"
#include "launch/failure.h"
#include "launch/join.h"
#include "launch/log_folder.h"
#include "launch/rendezvous_conf.h"
#include "launch/rendezvous_host.h"
#include "launch/signals.h"
#include "launch/store_process.h"
#include "launch/workers.h"

namespace accelerate::detail::launch {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = AgentMessage::Kind;
using std::chrono::milliseconds;

// How long to wait for other machines after the workers of this one have ended by a signal.
constexpr auto kTimeToEnd = std::chrono::seconds(5);
// When to report that machines are missing, and how often.
constexpr auto kFirstNotice = std::chrono::seconds(5);
constexpr auto kNextNotice = std::chrono::seconds(30);
// How long a machine whose workers have succeeded waits for the verdict.
constexpr auto kWaitForOthers = std::chrono::seconds(300);

const std::vector<int> kDefaultSignals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};
constexpr std::string_view kPreempted =
    "accelerate: preempted: the workers saved their state, exit code 75";

/// Binds the worker port, so that no other program can take it.
Descriptor open_worker_port(const LaunchConfig& config, Console& console) {
  std::string error;
  const bool loopback = config.master_addr == "127.0.0.1";
  if (auto socket = listen_on(config.master_port, loopback, error)) return std::move(*socket);
  if (config.several_machines()) {
    throw Error(str("port ", config.master_port,
                    ", where the machines of this job meet, cannot be opened: ", error,
                    ". Give another --main_process_port on all machines."));
  }
  console.say(str("accelerate: port ", config.master_port, " cannot be opened (", error,
                  "); taking a free one. Give --main_process_port 0 to always do so."));
  if (auto socket = listen_on(0, loopback, error)) return std::move(*socket);
  throw Error(str("no port can be opened: ", error, "."));
}

class Agent {
 public:
  explicit Agent(const LaunchPlan& plan)
      : plan_(plan),
        config_(plan.agent),
        elastic_(config_.several_machines() && config_.elastic()),
        conf_(RendezvousConf::parse(config_.rdzv_configs)),
        console_(STDOUT_FILENO, STDERR_FILENO),
        logs_(config_.logs.log_dir, config_.run_id,
              config_.logs.tee.any() || config_.logs.redirects.any()),
        signals_(config_.signals_to_handle.empty() ? kDefaultSignals : config_.signals_to_handle) {
    if (logs_.temporary()) {
      cleanup_.add_folder(logs_.base());
    } else if (!config_.logs.log_dir && !plan_.quiet) {
      console_.say(str("accelerate: logs go to ", logs_.run().string()));
    }
  }

  int run() {
    join_or_host();
    while (!exit_code_) step();
    wait_for_others();
    write_output();
    // A run whose output is lost, e.g. on a full disk, has not succeeded.
    return *exit_code_ == 0 && console_.has_lost_output() ? kFailure : *exit_code_;
  }

 private:
  enum class Doing : std::uint8_t { kWaits, kRuns, kStops };

  // -- Rendezvous ------------------------------------------------------------------------------

  [[nodiscard]] bool should_host() const {
    if (!config_.several_machines()) return true;
    if (!elastic_) return config_.node_rank == 0;
    return conf_.is_host.value_or(is_this_machine(config_.master_addr));
  }

  void join_or_host() {
    try {
      if (should_host() && !joins_another_machine_0() && become_host()) return;
      if (!link_) link_.emplace(join_job(config_, member(), conf_, signals_, console_));
    } catch (const Interrupted& by) {
      exit_code_ = 128 + by.signal;
    }
  }

  /// --main_process_ip is not an address of this machine 0: another machine 0 may run there. Joins
  /// that one, which then reports two machines with the same rank.
  bool joins_another_machine_0() {
    if (elastic_ || !config_.several_machines() || is_this_machine(config_.master_addr))
      return false;
    auto once = conf_;
    once.join_timeout = milliseconds(1);
    try {
      link_.emplace(join_job(config_, member(), once, signals_, console_));
      return true;
    } catch (const Error&) {
      console_.say(str("accelerate: this is machine 0, but ", config_.master_addr,
                       " (--main_process_ip) is none of its addresses, which are ",
                       join(interface_addresses()),
                       ". Unless something in between leads here, check --machine_rank."));
      return false;
    }
  }

  /// Returns false if another launcher of this machine is the host already (c10d).
  bool become_host() {
    if (elastic_) {
      std::string error;
      auto listener = listen_on(config_.master_port, /*loopback_only=*/false, error);
      if (!listener) return false;
      listener_ = std::move(*listener);
      auto port = listen_on(conf_.store_port, /*loopback_only=*/false, error);
      if (!port) throw Error(str("no port for the workers' store: ", error, "."));
      worker_port_ = std::move(*port);
    } else {
      worker_port_ = open_worker_port(config_, console_);
    }
    const bool by_helper = config_.elastic() || !plan_.takes_listen_fd;
    const int port = port_of(worker_port_);
    if (by_helper) store_.emplace(worker_port_);
    if (by_helper && !store_->available()) leave_port_to_rank_0();
    RendezvousHostOptions options{.rules = {.min_nodes = config_.min_nodes,
                                            .max_nodes = config_.max_nodes,
                                            .fixed = !elastic_,
                                            .max_restarts = config_.max_restarts,
                                            .shutdown_timeout = config_.shutdown_timeout,
                                            .join_timeout = conf_.join_timeout,
                                            .last_call = conf_.last_call},
                                  .master_port = port,
                                  .agent_store = store_.has_value(),
                                  .keep_alive = conf_.keep_alive};
    const Descriptor* listener =
        elastic_ ? &listener_ : (config_.several_machines() ? &worker_port_ : nullptr);
    host_.emplace(options, listener, Clock::now());
    link_.emplace(host_->own_channel());
    link_->send({.kind = Kind::kHello, .member = member()});
    return true;
  }

  /// Without `accelerate-torch`, rank 0 opens the port itself.
  void leave_port_to_rank_0() {
    if (elastic_) {
      throw Error(
          str("--rdzv_backend c10d needs the program accelerate-torch, which is neither beside ",
              "accelerate nor in PATH. Install it, or use --rdzv_backend static."));
    }
    store_.reset();
    // With several machines the agents connect here first; it is closed when workers start.
    if (!config_.several_machines()) worker_port_.reset();
  }

  [[nodiscard]] Member member() const {
    const auto nodes = config_.min_nodes == config_.max_nodes
                           ? str(config_.max_nodes)
                           : str(config_.min_nodes, ":", config_.max_nodes);
    auto terms = str("--num_machines ", nodes, ", --max_restarts ", config_.max_restarts);
    if (config_.run_id != "none") terms += str(", --rdzv_id ", config_.run_id);
    if (!elastic_) terms += str(", ", config_.nproc_per_node, " processes per machine");
    return {.machine_rank = config_.node_rank,
            .nproc = config_.nproc_per_node,
            .host = this_host_name(),
            .address = config_.local_addr.empty() ? config_.master_addr : config_.local_addr,
            .terms = terms};
  }

  // -- The event loop -------------------------------------------------------------------------

  void step() {
    std::vector<pollfd> fds{{.fd = signals_.fd(), .events = POLLIN, .revents = 0}, link_->wants()};
    if (host_) host_->wants(fds);
    const std::size_t store_at = fds.size();
    if (doing_ == Doing::kRuns && store_ && !store_->running()) {
      fds.push_back({.fd = worker_port_.get(), .events = POLLIN, .revents = 0});
    }
    const std::size_t console_at = fds.size();
    console_.wants(fds);

    const auto failures = wait(next_event(), fds);
    if (store_at < console_at && fds[store_at].revents != 0) store_->start();
    console_.flush();
    while (const auto signal = signals_.next()) handle_signal(*signal);
    report(failures);
    if (host_) host_->work(Clock::now());
    for (const auto& message : link_->exchange(Clock::now())) handle(message);
    link_->keep_alive(conf_.keep_alive / 4, Clock::now());
    check_times(Clock::now());
  }

  std::vector<WorkerFailure> wait(Clock::time_point until, std::vector<pollfd>& fds) {
    if (workers_) return workers_->wait(until, fds);
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now());
    const auto limit = std::clamp(left, milliseconds(0), milliseconds(60'000));
    if (::poll(fds.data(), fds.size(), static_cast<int>(limit.count())) < 0) {
      for (auto& each : fds) each.revents = 0;
    }
    return {};
  }

  [[nodiscard]] Clock::time_point next_event() const {
    const auto now = Clock::now();
    const std::chrono::duration<double> interval(config_.monitor_interval);
    auto next = now + std::chrono::duration_cast<Clock::duration>(interval);
    if (host_) next = std::min(next, host_->next_event(now));
    if (kill_at_) next = std::min(next, *kill_at_);
    return next;
  }

  void check_times(Clock::time_point now) {
    if (kill_at_ && now >= *kill_at_) {
      if (workers_) workers_->signal(SIGKILL);
      kill_at_.reset();
    }
    if (done_since_ && !host_ && now - *done_since_ > kWaitForOthers) exit_code_ = 0;
    const bool silent = now - link_->last_heard() > conf_.keep_alive && !host_;
    if (doing_ != Doing::kStops && (link_->closed() || silent) && !exit_code_) lose_host(silent);
    if (doing_ == Doing::kStops && !(workers_ && workers_->running())) after_stop();
    tell_who_is_missing(now);
    // The host ends last.
    if (signal_ && !workers_ && (!host_ || host_->ended() || now >= *leave_by_)) end_by_signal();
  }

  void tell_who_is_missing(Clock::time_point now) {
    if (!host_ || !host_->gathering()) {
      notice_at_.reset();
    } else if (!notice_at_) {
      notice_at_ = now + kFirstNotice;
    } else if (now >= *notice_at_) {
      notice_at_ = now + kNextNotice;
      if (plan_.quiet) return;
      console_.say(str("accelerate: waiting at ", config_.master_addr, ":", config_.master_port,
                       " for machines; ", host_->missing()));
    }
  }

  // -- Orders of the coordinator ----------------------------------------------------------------

  void handle(const AgentMessage& message) {
    switch (message.kind) {
      case Kind::kStart:
        return start(message);
      case Kind::kStop:
        return stop();
      case Kind::kEnd:
        return finish(message.verdict);
      case Kind::kNotice:
        if (!plan_.quiet) console_.say("accelerate: " + message.text);
        return;
      default:
        return;
    }
  }

  void start(const AgentMessage& message) {
    if (signal_) return;  // this launcher is about to end
    workers_.emplace(plan_, console_, logs_, cleanup_);
    StoreFacts store{.port = message.master_port, .agent_store = message.agent_store};
    if (host_ && !store.agent_store && worker_port_) {
      if (plan_.takes_listen_fd) {
        store.listen_fd = worker_port_.get();
      } else {
        worker_port_.reset();  // no helper: rank 0 opens the port itself
      }
    }
    failures_.clear();
    reported_end_ = false;
    done_since_.reset();
    doing_ = Doing::kRuns;
    workers_->start(message.round, store);
  }

  void report(const std::vector<WorkerFailure>& failures) {
    AgentMessage message{.kind = Kind::kFailed};
    for (const auto& failure : failures) {
      if (!failure.terminated_by_launcher) message.failures.push_back(failure);
      failures_.push_back(failure);
    }
    message.all_ended = doing_ == Doing::kRuns && !workers_->running() && !reported_end_;
    const bool failed = !failures_.empty();
    if (!message.failures.empty() || (message.all_ended && failed)) link_->send(message);
    if (!message.all_ended) return;
    reported_end_ = true;
    if (failed) return;  // the coordinator decides about the other workers
    done_since_ = Clock::now();
    link_->send({.kind = Kind::kSucceeded});
  }

  void stop() {
    if (doing_ != Doing::kStops) end_workers(SIGTERM);
  }

  void end_workers(int signal) {
    doing_ = Doing::kStops;
    if (!workers_) return;
    workers_->expect_end();
    workers_->signal(signal);
    // A stopped process handles the signal only when it runs again.
    workers_->signal(SIGCONT);
    kill_at_ = Clock::now() + config_.shutdown_timeout;
  }

  void after_stop() {
    doing_ = Doing::kWaits;
    kill_at_.reset();
    workers_.reset();
    if (store_) store_->stop();
    if (verdict_) return conclude(*verdict_);
    if (signal_) return;
    // Rank 0 had the port; now agents connect there again.
    if (host_ && config_.several_machines() && !worker_port_) {
      worker_port_ = open_worker_port(config_, console_);
    }
    AgentMessage message{.kind = Kind::kStopped};
    std::ranges::copy_if(failures_, std::back_inserter(message.failures),
                         &WorkerFailure::terminated_by_launcher);
    link_->send(message);
  }

  void finish(const Verdict& verdict) {
    verdict_ = verdict;
    if (workers_ && workers_->running()) return stop();
    conclude(verdict);
  }

  void conclude(const Verdict& verdict) {
    exit_code_ = verdict.exit_code;
    // An error of the job, which no worker reports: shown even with --quiet.
    if (!verdict.reason.empty()) console_.say("accelerate: " + verdict.reason);
    if (plan_.quiet) return;
    if (verdict.exit_code == kPreemptedExitCode) return console_.say(kPreempted);
    const bool has_failure = std::ranges::any_of(
        verdict.failures, [](const auto& each) { return !each.terminated_by_launcher; });
    if (has_failure) console_.say(failure_report(plan_.program, verdict.failures));
  }

  void lose_host(bool silent) {
    const auto where = str(config_.master_addr, ":", config_.master_port);
    finish({.exit_code = kPeerGone,
            .reason = silent ? str("the launcher at ", where, " has been silent for ",
                                   seconds_text(conf_.keep_alive),
                                   ": the machine or the network to it is down.")
                             : str("the launcher at ", where, ", which leads this job, is gone.")});
  }

  // -- Signals ------------------------------------------------------------------------------------

  void handle_signal(int signal) {
    switch (signal) {
      case SIGTSTP:
        return suspend();
      case SIGCONT:
        if (workers_) workers_->signal(SIGCONT);
        return;
      case SIGWINCH:
        if (workers_) workers_->set_terminal_size();
        return;
      case SIGUSR1:
        return is_passed_on_only(signal) ? pass_on(signal) : leave(signal);
      default:
        return leave(signal);
    }
  }

  /// SIGUSR1 asks workers to save their state and to end, or means something else to them: they
  /// have no time limit. Without workers, or in --signals_to_handle, it ends the launcher.
  [[nodiscard]] bool is_passed_on_only(int signal) const {
    return doing_ == Doing::kRuns &&
           std::ranges::find(config_.signals_to_handle, signal) == config_.signals_to_handle.end();
  }

  void pass_on(int signal) {
    link_->send({.kind = Kind::kPassedOn, .signal = signal});
    workers_->signal(signal);
  }

  /// Ctrl-Z. Workers have sessions of their own, where SIGTSTP has no effect.
  void suspend() {
    if (workers_) workers_->signal(SIGSTOP);
    console_.finish();
    ::raise(SIGSTOP);
    if (workers_) workers_->signal(SIGCONT);
    link_->forgive(Clock::now());
  }

  void leave(int signal) {
    if (signal_) {  // the second signal
      hurries_ = true;
      if (workers_) workers_->signal(SIGKILL);
      return;
    }
    signal_ = signal;
    leave_by_ = Clock::now() + config_.shutdown_timeout + kTimeToEnd;
    link_->send({.kind = Kind::kLeaving, .signal = signal});
    end_workers(signal);
  }

  void end_by_signal() {
    exit_code_ = code_after_signal();
    if (plan_.quiet) return;
    if (exit_code_ == kPreemptedExitCode) return console_.say(kPreempted);
    console_.say(str("accelerate: stopped by ", signal_name(*signal_)));
  }

  /// 75 if all workers saved their state, which they may have done before the signal came here;
  /// else the code of a worker that ended after it by itself.
  [[nodiscard]] int code_after_signal() const {
    if (is_preemption(failures_)) return kPreemptedExitCode;
    for (const auto& failure : failures_) {
      const bool by_itself = failure.status.signal == 0 && !failure.is_preempted();
      if (failure.terminated_by_launcher && by_itself) return failure.status.code;
    }
    return 128 + *signal_;
  }

  /// The host ends after all other machines have been sent the verdict.
  void wait_for_others() {
    const auto limit = Clock::now() + std::chrono::seconds(5);
    while (host_ && !host_->over() && Clock::now() < limit) {
      std::vector<pollfd> fds;
      host_->wants(fds);
      ::poll(fds.data(), fds.size(), 50);
      host_->work(Clock::now());
    }
    while (link_ && !link_->idle() && !link_->closed() && Clock::now() < limit) {
      auto wants = link_->wants();
      ::poll(&wants, 1, 50);
      (void)link_->exchange(Clock::now());
    }
  }

  /// Writes what is queued. After an interrupt it does not wait for a reader.
  void write_output() {
    while (!hurries_ && !console_.finish(signals_.fd())) {
      while (const auto signal = signals_.next()) {
        hurries_ = hurries_ || (*signal != SIGTSTP && *signal != SIGCONT && *signal != SIGWINCH);
      }
    }
  }

  const LaunchPlan& plan_;
  const LaunchConfig& config_;
  const bool elastic_;  // machines come and go
  RendezvousConf conf_;
  CleanupProcess cleanup_;
  Console console_;
  LogFolder logs_;
  SignalQueue signals_;

  Descriptor listener_;     // c10d: for the agents of other machines
  Descriptor worker_port_;  // for the workers' store; static: also for the agents
  std::optional<StoreProcess> store_;
  std::optional<RendezvousHost> host_;
  std::optional<Channel> link_;

  Doing doing_ = Doing::kWaits;
  std::optional<Workers> workers_;
  std::vector<WorkerFailure> failures_;  // of this round
  bool reported_end_ = false;            // that no worker of the round runs any more
  std::optional<Clock::time_point> kill_at_;
  std::optional<Clock::time_point> done_since_;
  std::optional<Clock::time_point> notice_at_;
  std::optional<int> signal_;
  bool hurries_ = false;  // a second signal has come
  std::optional<Clock::time_point> leave_by_;
  std::optional<Verdict> verdict_;
  std::optional<int> exit_code_;
};

}  // namespace

int run_agent(const LaunchPlan& plan) { return Agent(plan).run(); }

}  // namespace accelerate::detail::launch
