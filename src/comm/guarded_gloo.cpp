// Gloo with a guard: collectives that differ between ranks are never paired, and the error names
// the rank.
//
// The one translation unit that sees Gloo's headers. The LibTorch wheel contains Gloo but not its
// headers; Debian's libgloo-dev lends them. Only c10d's own class is used, and nothing of Gloo is
// linked.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "comm/call_checks.h"
#include "comm/collective_range.h"
#include "comm/group_guard.h"
#include "comm/guarded_backend.h"
#include "comm/guarded_gloo.h"
#include "comm/message_exchange.h"
#include "core/exception_text.h"
#include "core/text.h"
#include "state/process_group.h"

namespace accelerate::detail::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;

// Up to this many bytes a collective of Gloo is all latency: it hands the work to a thread and
// waits for that thread, which a message from rank to rank does not.
constexpr std::size_t kShortMessage = 64 << 10;

std::string message_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (...) {
    return current_exception_text().message;
  }
}

/// The works of Gloo for one collective.
struct UnderWay {
  std::vector<WorkPtr> works;
  /// Called when all are complete; `results` are then the results, else those of the works.
  std::function<void()> finish = {};
  Tensors results = {};
};

/// A collective under way. It completes when Gloo's does, or fails when the group fails, whichever
/// is first; Gloo's own work may then never end.
class GuardedWork : public c10d::Work {
 public:
  GuardedWork(const char* kind, UnderWay under_way, std::shared_ptr<GroupGuard> guard,
              const Ticket& ticket)
      : Work(-1, under_way.works.front()->retrieveOpType()),
        kind_(kind),
        under_way_(std::move(under_way)),
        guard_(std::move(guard)),
        ticket_(ticket),
        future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()))),
        incomplete_(under_way_.works.size()) {}

  static WorkPtr start(const char* kind, UnderWay under_way,
                       const std::shared_ptr<GroupGuard>& guard, const Ticket& ticket) {
    auto work = c10::make_intrusive<GuardedWork>(kind, std::move(under_way), guard, ticket);
    guard->on_failure(ticket, [work] {
      if (work->claim()) work->future_->setError(work->guard_->verdict(work->ticket_));
    });
    for (const auto& inner : work->under_way_.works) {
      inner->getFuture()->addCallback([work](Future& inner) { work->take(inner); },
                                      /*uses_future=*/false);
    }
    return work;
  }

  // The timeout is Gloo's own; it ends Gloo's works, and the guard finds out why.
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    guard_->refuse_forked_copy("wait for a collective");
    const auto range = CollectiveRange::wait(kind_);
    future_->waitAndThrow();
    return true;
  }
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  std::exception_ptr exception() const override {
    return future_->hasError() ? future_->exception_ptr() : nullptr;
  }
  std::vector<at::Tensor> result() override {
    return under_way_.results.empty() ? under_way_.works.front()->result() : under_way_.results;
  }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return ticket_.sequence; }

 private:
  [[nodiscard]] bool claim() { return !claimed_.exchange(true); }

  /// On a thread of Gloo.
  void take(Future& inner) {
    if (inner.hasError()) {
      // A lost connection is a consequence. The cause is found within two seconds, and this work
      // then fails with it.
      return guard_->transport_failed(ticket_, message_of(inner.exception_ptr()));
    }
    if (--incomplete_ > 0 || !claim()) return;
    if (const auto finish = std::exchange(under_way_.finish, nullptr)) finish();
    const auto& results = under_way_.results;
    guard_->leave(ticket_);
    future_->markCompleted(results.empty() ? inner.value() : c10::IValue(results));
  }

  const char* kind_;  // a literal
  UnderWay under_way_;
  std::shared_ptr<GroupGuard> guard_;
  Ticket ticket_;
  c10::intrusive_ptr<Future> future_;
  std::atomic<std::size_t> incomplete_;
  std::atomic<bool> claimed_{false};
};

/// A collective that is complete already.
class DoneWork : public c10d::Work {
 public:
  DoneWork(c10d::OpType kind, Tensors results, std::uint64_t sequence)
      : Work(-1, kind),
        results_(std::move(results)),
        sequence_(sequence),
        future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(results_));
    finish();
  }

  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  Tensors results_;
  std::uint64_t sequence_;
  c10::intrusive_ptr<Future> future_;
};

/// A message from rank to rank. The other ranks do not take part, so it is not announced; but it
/// fails when the group does, and a broken connection is diagnosed as for collectives.
class MessageWork : public c10d::Work {
 public:
  MessageWork(WorkPtr inner, std::shared_ptr<GroupGuard> guard, at::Tensor tensor, int peer)
      : Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        guard_(std::move(guard)),
        tensor_(std::move(tensor)),
        peer_(peer),
        ticket_(guard_->message()) {
    guard_->on_failure(ticket_, [inner = inner_] { inner->abort(); });
  }
  ~MessageWork() override { guard_->leave(ticket_); }

  bool wait(std::chrono::milliseconds timeout) override {
    guard_->refuse_forked_copy("wait for a message");
    std::string problem;
    try {
      const bool done = inner_->wait(timeout);
      if (done || !guard_->failed()) return done;
    } catch (const std::exception&) {
      problem = current_exception_text().message;
    }
    const bool sends = retrieveOpType() == c10d::OpType::SEND;
    std::rethrow_exception(guard_->failure_of(message_text(sends, tensor_, peer_), problem, peer_));
  }
  void abort() override { inner_->abort(); }
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  c10::intrusive_ptr<Future> getFuture() override { return inner_->getFuture(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  WorkPtr inner_;
  std::shared_ptr<GroupGuard> guard_;
  at::Tensor tensor_;
  int peer_;
  Ticket ticket_;
};

class GuardedGloo : public GuardedBackend<Gloo> {
 public:
  GuardedGloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              c10::intrusive_ptr<Options> options, std::shared_ptr<GroupGuard> guard)
      : GuardedBackend(store, rank, size, std::move(options)),
        guard_(std::move(guard)),
        messages_(*this, guard_) {}

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduce_and_take(facts_of("reduce_scatter", input, number(options.reduceOp)), {output},
                           {dense_copy(input)}, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const char* kind = "reduce_scatter of lists";
    const auto& parts = only_one(inputs, kind);
    check_count(kind, "tensors", parts.size(), getSize());
    return reduce_and_take(facts(kind, outputs, number(options.reduceOp)), outputs,
                           {at::stack(parts).detach()}, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    Tensors copies;
    for (const auto& input : inputs) copies.push_back(dense_copy(input));
    const auto call = several("reduce_scatter of several", inputs, number(options.reduceOp));
    return reduce_and_take(call.facts(), outputs, copies, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    if (!is_short(output, input) || options.asyncOp) {
      return GuardedBackend::_allgather_base(output, input, options);
    }
    return exchange(facts_of("all_gather", input), output, input);
  }

  WorkPtr send(Tensors& tensors, int receiver, int tag) override {
    return message(true, tensors, receiver, [&] { return Gloo::send(tensors, receiver, tag); });
  }
  WorkPtr recv(Tensors& tensors, int sender, int tag) override {
    return message(false, tensors, sender, [&] { return Gloo::recv(tensors, sender, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return message(false, tensors, -1, [&] { return Gloo::recvAnysource(tensors, tag); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override {
    check_usable("monitoredBarrier");
    const Inside inside(this);  // it reports its failures by itself
    Gloo::monitoredBarrier(options, wait_for_all);
  }
  /// Gloo itself closes its connections with the last reference to it.
  void shutdown() override { destroyed_ = true; }

 private:
  /// While it lives, calls of Gloo are part of a call that is announced already.
  class Inside {
   public:
    explicit Inside(const GuardedGloo* group) { inside_ = group; }
    ~Inside() { inside_ = nullptr; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
  };

  void check_usable(const char* call) const {
    guard_->refuse_forked_copy(call);
    if (destroyed_)
      throw StateError(str(call, ": the process group was destroyed. Make a new one."));
  }

  template <class F>
  WorkPtr message(bool sends, const Tensors& tensors, int peer, F&& start) {
    if (inside_ == this || tensors.size() != 1) return start();
    check_usable(sends ? "send" : "recv");
    const auto& tensor = tensors.front();
    const auto failure = [&](const std::string& problem) {
      return guard_->failure_of(message_text(sends, tensor, peer), problem, peer);
    };
    if (guard_->failed()) std::rethrow_exception(failure("the group has failed"));
    try {
      return c10::make_intrusive<MessageWork>(start(), guard_, tensor, peer);
    } catch (const c10::Error&) {  // an invalid call: Gloo says why
      throw;
    } catch (const std::exception&) {
      std::rethrow_exception(failure(current_exception_text().message));
    }
  }

  WorkPtr start_guarded(const CallFacts& call, c10::function_ref<WorkPtr()> start) override {
    // Gloo implements some collectives by others, which are part of this call.
    if (inside_ == this) return start();
    return begin(call, [&] { return UnderWay{.works = {start()}}; });
  }

  template <class F>
  WorkPtr begin(const CallFacts& call, F&& start) {
    check_usable(call.kind);
    const auto range = CollectiveRange::call(call.kind);
    // Calls of several threads have the same order in the log and in Gloo.
    const std::scoped_lock lock(mutex_);
    const auto ticket = guard_->enter(call);
    collectiveCounter_ = tag_of(ticket);  // Gloo pairs collectives by it
    UnderWay under_way;
    try {
      const Inside inside(this);
      under_way = start();
    } catch (...) {  // Gloo refused it: nothing is under way
      guard_->leave(ticket);
      throw;
    }
    return GuardedWork::start(call.kind, std::move(under_way), guard_, ticket);
  }

  /// As Gloo does it: all ranks reduce everything, and each takes its part. Gloo does the latter in
  /// `wait`, so its own works have no future. `wholes` are overwritten.
  WorkPtr reduce_and_take(const CallFacts& call, const Tensors& outputs, const Tensors& wholes,
                          const c10d::ReduceScatterOptions& options) {
    check_pairs(call.kind, outputs, wholes);
    if (wholes.empty()) throw ArgumentError(str(call.kind, ": there is no tensor."));
    for (std::size_t i = 0; i < wholes.size(); ++i) {
      check_whole(call.kind, wholes[i], outputs[i], getSize());
    }
    c10d::AllreduceOptions of_each;
    of_each.reduceOp = options.reduceOp;
    of_each.timeout = options.timeout;
    return begin(call, [&] {
      UnderWay under_way{.works = {}, .finish = {}, .results = outputs};
      for (const auto& whole : wholes) {
        Tensors one{whole};
        under_way.works.push_back(Gloo::allreduce(one, of_each));
      }
      under_way.finish = [outputs, wholes, rank = getRank(), size = getSize()] {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        for (std::size_t i = 0; i < wholes.size(); ++i) {
          const auto parts = wholes[i].view({size, outputs[i].numel()});
          outputs[i].copy_(parts[rank].view(outputs[i].sizes()));
        }
      };
      return under_way;
    });
  }

  static at::Tensor dense_copy(const at::Tensor& tensor) {
    return tensor.detach().clone(at::MemoryFormat::Contiguous);
  }

  [[nodiscard]] bool is_short(const at::Tensor& output, const at::Tensor& input) const {
    return input.is_cpu() && output.nbytes() <= kShortMessage && input.is_contiguous() &&
           output.is_contiguous() && output.nbytes() == input.nbytes() * getSize() &&
           input.nbytes() > 0;
  }

  /// Every rank sends its part to every other one, on the thread of the caller.
  WorkPtr exchange(const CallFacts& call, const at::Tensor& output, const at::Tensor& input) {
    check_usable(call.kind);
    const auto range = CollectiveRange::call(call.kind);
    const std::scoped_lock lock(mutex_);
    const auto ticket = guard_->enter(call);
    const auto parts = output.view({getSize(), -1});
    const auto own = input.view({-1});
    std::vector<PeerMessage> arriving;
    std::vector<PeerMessage> leaving;
    for (int step = 1; step < getSize(); ++step) {
      const int from = (getRank() + getSize() - step) % getSize();
      arriving.push_back({from, parts[from]});
      leaving.push_back({(getRank() + step) % getSize(), own});
    }
    parts[getRank()].copy_(own);
    {
      const Inside inside(this);
      messages_.exchange(ticket, arriving, leaving);
    }
    guard_->leave(ticket);
    return c10::make_intrusive<DoneWork>(c10d::OpType::_ALLGATHER_BASE, Tensors{output},
                                         ticket.sequence);
  }

  static thread_local const GuardedGloo* inside_;

  std::shared_ptr<GroupGuard> guard_;
  MessageExchange messages_;
  std::mutex mutex_;
  std::atomic<bool> destroyed_{false};
};

thread_local const GuardedGloo* GuardedGloo::inside_ = nullptr;

c10::intrusive_ptr<Gloo::Options> gloo_options(const state::ProcessGroupOptions& options) {
  auto gloo = Gloo::Options::create(options.timeout);
  if (const auto interfaces = Environment::process().get("GLOO_SOCKET_IFNAME")) {
    for (const auto& name : split(*interfaces, ',')) {
      gloo->devices.push_back(Gloo::createDeviceForInterface(std::string(trim(name))));
    }
  } else if (!options.address.empty()) {
    gloo->devices.push_back(Gloo::createDeviceForHostname(options.address));
  } else {
    gloo->devices.push_back(Gloo::createDefaultDevice());
  }
  // Two threads per device, as in Python, run the collectives of overlapping buckets.
  gloo->threads = static_cast<int>(gloo->devices.size()) * 2;
  return gloo;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                            const state::ProcessGroupOptions& options) {
  return c10::make_intrusive<Gloo>(store, options.rank, options.world_size, gloo_options(options));
}

c10::intrusive_ptr<c10d::Backend> make_guarded_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const state::ProcessGroupOptions& options,
                                                    const std::shared_ptr<GroupGuard>& guard) {
  auto group = c10::make_intrusive<GuardedGloo>(store, options.rank, options.world_size,
                                                gloo_options(options), guard);
  // After a failure Gloo's destructor would wait for work that never completes: leak the object.
  guard->when_failed(
      [weak = c10::weak_intrusive_ptr<GuardedGloo>(group)] { (void)weak.lock().release(); });
  return group;
}

}  // namespace accelerate::detail::comm
