// Gloo with a guard: collectives that do not fit together never pair, and fail with a name.
//
// The one translation unit that sees Gloo's headers. The LibTorch wheel contains Gloo but not its
// headers; Debian's libgloo-dev lends them. Only c10d's own class is used, and nothing of Gloo is
// linked.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "comm/call_facts.h"
#include "comm/group_guard.h"
#include "comm/guarded_gloo.h"
#include "core/text.h"
#include "state/process_group.h"

namespace accelerate::detail {
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
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

/// A collective under way. It completes when Gloo's does, or fails when the group has failed,
/// whichever is first; Gloo's own may then never come back.
class GuardedWork : public c10d::Work {
 public:
  GuardedWork(WorkPtr inner, std::shared_ptr<GroupGuard> guard, const Ticket& ticket)
      : Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        guard_(std::move(guard)),
        ticket_(ticket),
        future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()))) {}

  static WorkPtr start(WorkPtr inner, const std::shared_ptr<GroupGuard>& guard,
                       const Ticket& ticket) {
    auto work = c10::make_intrusive<GuardedWork>(std::move(inner), guard, ticket);
    guard->on_failure(ticket, [work] {
      if (work->claim()) work->future_->setError(work->guard_->verdict(work->ticket_));
    });
    work->inner_->getFuture()->addCallback([work](Future& inner) { work->take(inner); },
                                           /*uses_future=*/false);
    return work;
  }

  // The timeout is Gloo's own; it ends `inner_`, and the guard finds out why.
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    future_->waitAndThrow();
    return true;
  }
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  std::exception_ptr exception() const override {
    return future_->hasError() ? future_->exception_ptr() : nullptr;
  }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return ticket_.sequence; }

 private:
  [[nodiscard]] bool claim() { return !claimed_.exchange(true); }

  /// On a thread of Gloo.
  void take(Future& inner) {
    if (inner.hasError()) {
      // A lost connection is a consequence. Its cause is found within two seconds, and then this
      // work fails with it.
      return guard_->transport_failed(ticket_, message_of(inner.exception_ptr()));
    }
    if (!claim()) return;
    guard_->leave(ticket_);
    future_->markCompleted(inner.value());
  }

  WorkPtr inner_;
  std::shared_ptr<GroupGuard> guard_;
  Ticket ticket_;
  c10::intrusive_ptr<Future> future_;
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

class GuardedGloo : public Gloo {
 public:
  GuardedGloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              c10::intrusive_ptr<Options> options, std::shared_ptr<GroupGuard> guard)
      : Gloo(store, rank, size, std::move(options)), guard_(std::move(guard)) {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return guarded(facts("broadcast", tensors, -1, static_cast<int>(options.rootRank)),
                   [&] { return Gloo::broadcast(tensors, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return guarded(facts("all_reduce", tensors, number(options.reduceOp)),
                   [&] { return Gloo::allreduce(tensors, options); });
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    // Ranks may hold different numbers of entries; the shape is that of the whole.
    return guarded(facts("all_reduce of sparse", tensors, number(options.reduceOp)),
                   [&] { return Gloo::allreduce_sparse(tensors, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return guarded(facts("all_reduce of several", tensors, number(options.reduceOp)),
                   [&] { return Gloo::allreduce_coalesced(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return guarded(
        facts("reduce", tensors, number(options.reduceOp), static_cast<int>(options.rootRank)),
        [&] { return Gloo::reduce(tensors, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return guarded(facts_of("reduce_scatter", input, number(options.reduceOp)),
                   [&] { return Gloo::_reduce_scatter_base(output, input, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return guarded(facts("reduce_scatter of lists", outputs, number(options.reduceOp)),
                   [&] { return Gloo::reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return guarded(facts("reduce_scatter of several", inputs, number(options.reduceOp)),
                   [&] { return Gloo::reduce_scatter_tensor_coalesced(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    const auto call = facts_of("all_gather", input);
    if (is_short(output, input) && !options.asyncOp) return exchange(call, output, input);
    return guarded(call, [&] { return Gloo::_allgather_base(output, input, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return guarded(facts("all_gather to lists", inputs),
                   [&] { return Gloo::allgather(outputs, inputs, options); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return guarded(facts("all_gather of several", inputs),
                   [&] { return Gloo::allgather_coalesced(outputs, inputs, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return guarded(facts("all_gather of several", inputs),
                   [&] { return Gloo::allgather_into_tensor_coalesced(outputs, inputs, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return guarded(facts("gather to one", inputs, -1, static_cast<int>(options.rootRank)),
                   [&] { return Gloo::gather(outputs, inputs, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return guarded(facts("scatter", outputs, -1, static_cast<int>(options.rootRank)),
                   [&] { return Gloo::scatter(outputs, inputs, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& out_counts, std::vector<std::int64_t>& in_counts,
                        const c10d::AllToAllOptions& options) override {
    // With counts of their own the ranks hold tensors of different sizes, and all is well.
    const bool even = out_counts.empty() && in_counts.empty();
    const CallFacts call = even ? facts_of("all_to_all", input)
                                : CallFacts{.kind = "all_to_all of different sizes",
                                            .dtype = dtype_literal(input.scalar_type())};
    return guarded(
        call, [&] { return Gloo::alltoall_base(output, input, out_counts, in_counts, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return guarded({.kind = "barrier"}, [&] { return Gloo::barrier(options); });
  }

 private:
  static int number(const c10d::ReduceOp& reduction) {
    return static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(reduction.op_));
  }

  static CallFacts facts(const char* kind, const Tensors& tensors, int reduction = -1,
                         int root = -1) {
    if (!tensors.empty()) return facts_of(kind, tensors.front(), reduction, root);
    return {.kind = kind, .reduction = reduction, .root = root};
  }

  /// Gloo pairs collectives by their tag. One that says what the call is keeps calls apart that do
  /// not fit together: no data moves between them.
  static std::uint32_t tag_of(const Ticket& ticket) {
    return static_cast<std::uint32_t>(ticket.sequence << 20) |
           static_cast<std::uint32_t>(
               (ticket.signature ^ ticket.sequence * 0x9e3779b97f4a7c15ULL) >> 44);
  }

  template <class F>
  WorkPtr guarded(const CallFacts& call, F&& start) {
    // Gloo carries some collectives out by others, which are the same call.
    if (inside_ == this) return start();
    // Calls of several threads keep one order in the log and in Gloo.
    const std::scoped_lock lock(mutex_);
    const auto ticket = guard_->enter(call);
    collectiveCounter_ = tag_of(ticket);
    WorkPtr inner;
    inside_ = this;
    try {
      inner = start();
      inside_ = nullptr;
    } catch (...) {  // Gloo refused it: nothing is under way
      inside_ = nullptr;
      guard_->leave(ticket);
      throw;
    }
    return GuardedWork::start(std::move(inner), guard_, ticket);
  }

  [[nodiscard]] bool is_short(const at::Tensor& output, const at::Tensor& input) const {
    return input.is_cpu() && output.nbytes() <= kShortMessage && input.is_contiguous() &&
           output.is_contiguous() && output.nbytes() == input.nbytes() * getSize() &&
           input.nbytes() > 0;
  }

  /// Every rank sends its part to every other one, on the thread of the caller.
  WorkPtr exchange(const CallFacts& call, const at::Tensor& output, const at::Tensor& input) {
    const std::scoped_lock lock(mutex_);
    const auto ticket = guard_->enter(call);
    const int tag = static_cast<int>(tag_of(ticket) & 0x7fffffffU);
    const auto parts = output.view({getSize(), -1});
    const auto own = input.view({-1});
    std::vector<WorkPtr> under_way;
    try {
      for (int step = 1; step < getSize(); ++step) {
        Tensors arrives{parts[(getRank() + getSize() - step) % getSize()]};
        Tensors leaves{own};
        under_way.push_back(Gloo::recv(arrives, (getRank() + getSize() - step) % getSize(), tag));
        under_way.push_back(Gloo::send(leaves, (getRank() + step) % getSize(), tag));
      }
      guard_->on_failure(ticket, [under_way] {
        for (const auto& work : under_way) work->abort();
      });
      parts[getRank()].copy_(own);
      for (const auto& work : under_way) {
        if (!work->wait()) throw std::runtime_error("interrupted");
      }
    } catch (const std::exception& error) {
      std::rethrow_exception(guard_->explain(ticket, message_of(std::current_exception())));
    }
    guard_->leave(ticket);
    return c10::make_intrusive<DoneWork>(c10d::OpType::_ALLGATHER_BASE, Tensors{output},
                                         ticket.sequence);
  }

  static thread_local const GuardedGloo* inside_;

  std::shared_ptr<GroupGuard> guard_;
  std::mutex mutex_;
};

thread_local const GuardedGloo* GuardedGloo::inside_ = nullptr;

c10::intrusive_ptr<Gloo::Options> gloo_options(const GroupOptions& options) {
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
  // As many threads as Python's: two per device run the collectives of overlapping buckets.
  gloo->threads = static_cast<int>(gloo->devices.size()) * 2;
  return gloo;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_guarded_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const GroupOptions& options,
                                                    const std::shared_ptr<GroupGuard>& guard) {
  auto group = c10::make_intrusive<GuardedGloo>(store, options.rank, options.world_size,
                                                gloo_options(options), guard);
  // After a failure Gloo waits in its destructor for work that never completes. So it gets none.
  guard->when_failed(
      [weak = c10::weak_intrusive_ptr<GuardedGloo>(group)] { (void)weak.lock().release(); });
  return group;
}

}  // namespace accelerate::detail
