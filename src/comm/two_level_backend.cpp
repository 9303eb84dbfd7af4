#include "comm/two_level_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include "accelerate/errors.h"
#include "comm/call_checks.h"
#include "comm/call_facts.h"
#include "comm/guarded_gloo.h"
#include "comm/peers.h"
#include "comm/shm_tensors.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using OpType = c10d::OpType;
using ReduceOp = c10d::ReduceOp;

constexpr const char* kYes = "yes";
// Large tensors go through the levels in pieces that fit into the cache; the hosts then work at the
// same time.
constexpr std::int64_t kPieceBytes = 4 << 20;

std::size_t index(int number) { return static_cast<std::size_t>(number); }

struct Place {
  int host = 0;
  int local = 0;  // among the ranks of the host
};

Place place_of(const RanksByHost& hosts, int rank) {
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    const auto place = std::ranges::find(hosts[host], rank);
    if (place == hosts[host].end()) continue;
    return {static_cast<int>(host), static_cast<int>(place - hosts[host].begin())};
  }
  throw ArgumentError(str("rank ", rank, " is on no host."));
}

// At least one piece, even if it is empty: the ranks must meet.
template <class F>
void for_each_piece(const at::Tensor& data, F&& f) {
  const auto flat = data.view({-1});
  const auto most = kPieceBytes / flat.element_size();
  std::int64_t begin = 0;
  do {
    const auto count = std::min<std::int64_t>(most, flat.numel() - begin);
    f(flat.narrow(0, begin, count));
    begin += count;
  } while (begin < flat.numel());
}

void copy_back(const at::Tensor& to, const at::Tensor& from) {
  if (to.const_data_ptr() != from.const_data_ptr()) to.copy_(from);
}

}  // namespace

/// The guard of the shared memory of one host: its calls are stages of a call that the group's
/// guard knows already.
class TwoLevelBackend::HostGuard : public CallGuard {
 public:
  HostGuard(std::shared_ptr<GroupGuard> group, std::vector<int> ranks)
      : group_(std::move(group)), ranks_(std::move(ranks)) {}

  /// To be called before the first stage, on the thread that runs the stages.
  void begin(const Ticket& ticket) {
    ticket_ = ticket;
    stage_ = 0;
  }

  Ticket enter(const CallFacts& /*of the stage*/) override {
    // Unique for each stage of each call.
    const auto place = ((ticket_.sequence << 32) + ++stage_) * 0x9e3779b97f4a7c15ULL;
    return {ticket_.sequence, (ticket_.signature ^ place) | 1U};
  }
  void leave(const Ticket& /*of the stage*/) noexcept override {}
  [[noreturn]] void fail(const Ticket& /*of the stage*/, const std::string& suspicion,
                         int rank) override {
    // Shared memory counts the ranks of this host only.
    const bool known = rank >= 0 && index(rank) < ranks_.size();
    const auto what = str("among ranks ", join(ranks_), " of one host: ", suspicion);
    std::rethrow_exception(group_->explain(ticket_, what, known ? ranks_[index(rank)] : -1));
  }
  bool failed() const noexcept override { return group_->failed(); }

 private:
  std::shared_ptr<GroupGuard> group_;
  std::vector<int> ranks_;
  Ticket ticket_;
  std::uint64_t stage_ = 0;
};

// A collective in stages, which cannot be interrupted.
class TwoLevelBackend::StagedCall final : public ExecutorCall {
 public:
  StagedCall(TwoLevelBackend& backend, Stages stages)
      : backend_(backend), stages_(std::move(stages)) {}

  bool advance(const WaitBudget& /*budget*/) override {
    backend_.carry_out({.ticket = ticket, .timeout = timeout}, stages_);
    return true;
  }
  void release() noexcept override { stages_ = nullptr; }
  bool pausable() const noexcept override { return false; }

 private:
  TwoLevelBackend& backend_;
  Stages stages_;
};

// Dense memory, and the reduction of it.
struct TwoLevelBackend::Reducing {
  Reducing(const char* kind, const at::Tensor& tensor, const ReduceOp& reduction, int ranks)
      : operation(reduction.op_) {
    arithmetic = arithmetic_of(kind, tensor, reduction);
    data = dense(tensor);
    if (reduction.op_ != ReduceOp::AVG) return;
    // An average is the sum of all ranks, divided once; the dtype must hold the sum.
    divisor = ranks;
    operation = ReduceOp::SUM;
    if (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16) {
      data = data.to(at::kFloat);
    } else if (!tensor.is_floating_point() && !tensor.is_complex()) {
      data = data.to(at::kLong);
    }
    arithmetic = arithmetic_of(kind, data, ReduceOp::SUM);
  }

  void divide(const at::Tensor& piece) const {
    if (divisor == 1) return;
    if (piece.scalar_type() == at::kLong) {
      piece.div_(divisor, "trunc");
    } else {
      piece.div_(divisor);
    }
  }

  at::Tensor data;
  ReduceOp operation;
  ShmArithmetic arithmetic = {};
  std::int64_t divisor = 1;
};

c10::intrusive_ptr<TwoLevelBackend> TwoLevelBackend::try_make(
    const c10::intrusive_ptr<c10d::Store>& store, const state::ProcessGroupOptions& options,
    const state::Roster& roster, const RanksByHost& hosts, const ShmOptions& shm_options,
    const c10::intrusive_ptr<c10d::Backend>& gloo, const std::shared_ptr<GroupGuard>& guard,
    std::string& why_not) {
  const auto [host, local] = place_of(hosts, options.rank);
  const auto& ranks = hosts[index(host)];
  const auto host_guard = std::make_shared<HostGuard>(guard, ranks);
  c10::intrusive_ptr<ShmBackend> shm;
  why_not.clear();
  if (ranks.size() > 1) {
    const auto of_host = c10::make_intrusive<c10d::PrefixStore>(str("host/", host, "/shm"), store);
    shm = ShmBackend::try_make(of_host, local, static_cast<int>(ranks.size()), shm_options,
                               host_guard, why_not);
  }
  // All ranks of a host have the same answer, so the leader publishes it.
  const auto answer_of = [](int leader) { return str("two_level/", leader); };
  if (local == 0) roster.publish(answer_of(options.rank), why_not.empty() ? kYes : why_not);
  for (const auto& others : hosts) {
    const int leader = others.front();
    const auto answer = roster.read(answer_of(leader), leader);
    if (answer == kYes) continue;
    why_not = str("on the host of rank ", leader, ", ", answer);
    return nullptr;
  }
  std::unique_ptr<HostLeaders> leaders;
  if (local == 0) {
    auto of_leaders = options;
    of_leaders.rank = host;
    of_leaders.world_size = static_cast<int>(hosts.size());
    leaders = std::make_unique<HostLeaders>(
        make_gloo(c10::make_intrusive<c10d::PrefixStore>("leaders", store), of_leaders), guard);
  }
  return c10::make_intrusive<TwoLevelBackend>(options, hosts, gloo, guard, host_guard, shm,
                                              std::move(leaders));
}

TwoLevelBackend::TwoLevelBackend(const state::ProcessGroupOptions& options, RanksByHost hosts,
                                 c10::intrusive_ptr<c10d::Backend> gloo,
                                 std::shared_ptr<GroupGuard> guard,
                                 std::shared_ptr<HostGuard> host_guard,
                                 c10::intrusive_ptr<ShmBackend> shm,
                                 std::unique_ptr<HostLeaders> leaders)
    : ExecutorBackend(options.rank, options.world_size, options.timeout, guard),
      hosts_(std::move(hosts)),
      host_(place_of(hosts_, options.rank).host),
      gloo_(std::move(gloo)),
      guard_(std::move(guard)),
      host_guard_(std::move(host_guard)),
      shm_(std::move(shm)),
      leaders_(std::move(leaders)) {
  for (const auto& ranks : hosts_) order_.insert(order_.end(), ranks.begin(), ranks.end());
  init();
}

void TwoLevelBackend::close() noexcept {
  executor_->close([this] { leave_levels(); });
}

void TwoLevelBackend::leave_levels() noexcept {
  if (shm_) shm_->shutdown();
  if (leaders_) leaders_->close();
}

void TwoLevelBackend::setTimeout(std::chrono::milliseconds timeout) {
  ExecutorBackend::setTimeout(timeout);
  gloo_->setTimeout(timeout);
}

c10d::ErrorType TwoLevelBackend::getError() {
  return guard_->failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

TwoLevelBackend::WorkPtr TwoLevelBackend::start(BackendCall call, Stages stages) {
  const auto schedule = call.asynchronous ? Schedule::kBackground : Schedule::kInline;
  return submit(std::move(call), std::make_shared<StagedCall>(*this, std::move(stages)), schedule);
}

void TwoLevelBackend::carry_out(const CallPart& part, const Stages& stages) {
  // Hidden from autograd, as in the other backends.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (guard_->failed()) std::rethrow_exception(guard_->verdict(part.ticket));
  if (failure_) std::rethrow_exception(failure_);
  host_guard_->begin(part.ticket);
  try {
    stages(part);
  } catch (...) {
    // The other ranks are in the middle of this call, so later calls could not be paired.
    failure_ = std::current_exception();
    leave_levels();
    throw;
  }
}

// ---- all_reduce ---------------------------------------------------------------------------------

TwoLevelBackend::WorkPtr TwoLevelBackend::allreduce(Tensors& tensors,
                                                    const c10d::AllreduceOptions& options) {
  const char* kind = "all_reduce";
  const auto& tensor = only_one(tensors, kind);
  if (tensor.is_sparse()) return gloo_->allreduce(tensors, options);
  BackendCall call(OpType::ALLREDUCE, kind, options, tensors);
  call.facts.add(tensor);
  return start(
      std::move(call),
      [this, tensor, data = Reducing(kind, tensor, options.reduceOp, size_)](const CallPart& part) {
        all_reduce(part, data);
        copy_back(tensor, data.data);
      });
}

TwoLevelBackend::WorkPtr TwoLevelBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const char* kind = "all_reduce of several";
  BackendCall call(OpType::ALLREDUCE_COALESCED, kind, options, tensors);
  std::vector<Reducing> data;
  for (const auto& tensor : tensors) {
    call.facts.add(tensor);
    data.emplace_back(kind, tensor, options.reduceOp, size_);
  }
  return start(std::move(call), [this, tensors, data = std::move(data)](const CallPart& part) {
    for (std::size_t i = 0; i < data.size(); ++i) {
      all_reduce(part, data[i]);
      copy_back(tensors[i], data[i].data);
    }
  });
}

// Reduces the whole input, as Gloo does.
TwoLevelBackend::WorkPtr TwoLevelBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const char* kind = "reduce_scatter";
  check_whole(kind, input, output, size_);
  check_dense(kind, output);
  BackendCall call(OpType::_REDUCE_SCATTER_BASE, kind, options, {output});
  call.facts.add(input);
  return start(std::move(call), [this, output,
                                 data = Reducing(kind, input.detach().clone(), options.reduceOp,
                                                 size_)](const CallPart& part) {
    all_reduce(part, data);
    output.copy_(data.data.view({size_, -1})[rank_].view(output.sizes()));
  });
}

void TwoLevelBackend::all_reduce(const CallPart& call, const Reducing& reducing) {
  c10d::ReduceOptions options;
  options.reduceOp = reducing.operation;
  options.rootRank = 0;
  options.timeout = call.timeout;
  options.asyncOp = false;
  for_each_piece(reducing.data, [&](const at::Tensor& piece) {
    Tensors tensors{piece};
    if (shm_) shm_->reduce(tensors, options)->wait();
    if (leaders_) {
      leaders_->all_reduce(call, bytes_of(piece), reducing.arithmetic);
      reducing.divide(piece);
    }
    share_on_host(call, piece, 0);
  });
}

void TwoLevelBackend::share_on_host(const CallPart& call, const at::Tensor& data, int local_root) {
  if (!shm_) return;
  c10d::BroadcastOptions options;
  options.rootRank = local_root;
  options.timeout = call.timeout;
  options.asyncOp = false;
  Tensors tensors{data};
  shm_->broadcast(tensors, options)->wait();
}

// ---- broadcast, barrier -------------------------------------------------------------------------

TwoLevelBackend::WorkPtr TwoLevelBackend::broadcast(Tensors& tensors,
                                                    const c10d::BroadcastOptions& options) {
  const char* kind = "broadcast";
  const auto& tensor = only_one(tensors, kind);
  check_dense(kind, tensor);
  check_rank(kind, "root", options.rootRank, size_);
  const auto root = static_cast<int>(options.rootRank);
  BackendCall call(OpType::BROADCAST, kind, options, tensors);
  call.facts.add(tensor);
  return start(std::move(call), [this, tensor, root, data = dense(tensor)](const CallPart& part) {
    broadcast(part, data, root);
    copy_back(tensor, data);
  });
}

void TwoLevelBackend::broadcast(const CallPart& call, const at::Tensor& data, int root) {
  const auto place = place_of(hosts_, root);
  for_each_piece(data, [&](const at::Tensor& piece) {
    if (place.host == host_) share_on_host(call, piece, place.local);
    if (leaders_) leaders_->broadcast(call, bytes_of(piece), place.host);
    if (place.host != host_) share_on_host(call, piece, 0);
  });
}

TwoLevelBackend::WorkPtr TwoLevelBackend::barrier(const c10d::BarrierOptions& options) {
  BackendCall call(OpType::BARRIER, "barrier", options);
  return start(std::move(call), [this](const CallPart& part) {
    c10d::BarrierOptions on_host;
    on_host.timeout = part.timeout;
    on_host.asyncOp = false;
    if (shm_) shm_->barrier(on_host)->wait();
    if (leaders_) leaders_->barrier(part);
    if (shm_) shm_->barrier(on_host)->wait();
  });
}

// ---- all_gather ---------------------------------------------------------------------------------

TwoLevelBackend::WorkPtr TwoLevelBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather to lists";
  const auto& input = only_one(inputs, kind);
  const auto& list = only_one(outputs, kind);
  check_dense(kind, input);
  check_count(kind, "tensors", list.size(), size_);
  for (const auto& tensor : list) check_like(kind, tensor, input);
  BackendCall call(OpType::ALLGATHER, kind, options, list);
  call.facts.add(input);
  return start(std::move(call), [this, list, data = dense(input)](const CallPart& part) {
    const auto by_host = at::empty({size_, data.numel()}, data.options());
    all_gather(part, data, by_host);
    for (int i = 0; i < size_; ++i) {
      const auto& target = list[index(order_[index(i)])];
      target.copy_(by_host[i].view(target.sizes()));
    }
  });
}

TwoLevelBackend::WorkPtr TwoLevelBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather";
  check_dense(kind, input);
  check_dense(kind, output);
  check_whole(kind, output, input, size_);
  BackendCall call(OpType::_ALLGATHER_BASE, kind, options, {output});
  call.facts.add(input);
  return start(std::move(call), [this, output, data = dense(input)](const CallPart& part) {
    const bool in_place = output.is_contiguous() && std::ranges::is_sorted(order_);
    const auto by_host = in_place ? output.view({size_, data.numel()})
                                  : at::empty({size_, data.numel()}, data.options());
    all_gather(part, data, by_host);
    if (in_place) return;
    auto by_rank = at::empty_like(by_host);
    for (int i = 0; i < size_; ++i) by_rank[order_[index(i)]].copy_(by_host[i]);
    output.copy_(by_rank.view(output.sizes()));
  });
}

void TwoLevelBackend::all_gather(const CallPart& call, const at::Tensor& input,
                                 const at::Tensor& by_host) {
  std::vector<at::Tensor> blocks;
  std::int64_t begin = 0;
  for (const auto& ranks : hosts_) {
    const auto count = static_cast<std::int64_t>(ranks.size());
    blocks.push_back(by_host.narrow(0, begin, count));
    begin += count;
  }
  const auto& own = blocks[index(host_)];
  if (shm_) {
    c10d::GatherOptions options;
    options.rootRank = 0;
    options.timeout = call.timeout;
    options.asyncOp = false;
    Tensors inputs{input};
    TensorLists outputs;
    if (leaders_) outputs.push_back(own.unbind());
    shm_->gather(outputs, inputs, options)->wait();
  } else {
    own[0].copy_(input.view({-1}));
  }
  if (leaders_) {
    for (auto& block : blocks) block = bytes_of(block);
    leaders_->all_gather(call, blocks);
  }
  share_on_host(call, by_host, 0);
}

}  // namespace accelerate::detail::comm
