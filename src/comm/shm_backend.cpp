#include "comm/shm_backend.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "comm/backend_work.h"
#include "comm/call_checks.h"
#include "comm/call_facts.h"
#include "comm/shm_collectives.h"
#include "comm/shm_tensors.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using OpType = c10d::OpType;

template <class Part>
std::vector<Part> parts_of(const Part& whole, int size) {
  std::vector<Part> parts;
  const auto bytes = whole.bytes / static_cast<std::size_t>(size);
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back({whole.data + bytes * static_cast<std::size_t>(rank), bytes});
  }
  return parts;
}

// The rows of a tensor, divided by `splits`; evenly if that is empty.
template <class Part>
std::vector<Part> rows_of(const char* kind, const Part& whole, const at::Tensor& tensor,
                          const std::vector<std::int64_t>& splits, int size) {
  const auto rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size == 0) return parts_of(whole, size);
    throw ArgumentError(str(kind, ": ", rows, " rows cannot be divided evenly among ", size,
                            " ranks. Pass split sizes."));
  }
  check_count(kind, "split sizes", splits.size(), size);
  std::int64_t sum = 0;
  for (const auto split : splits) sum += split;
  if (sum != rows || *std::min_element(splits.begin(), splits.end()) < 0) {
    throw ArgumentError(str(kind, ": the split sizes ", join(splits), " do not add up to the ",
                            rows, " rows of the tensor."));
  }
  const auto row_bytes = rows == 0 ? 0 : whole.bytes / static_cast<std::size_t>(rows);
  std::vector<Part> parts;
  auto* data = whole.data;
  for (const auto split : splits) {
    const auto bytes = row_bytes * static_cast<std::size_t>(split);
    parts.push_back({data, bytes});
    data += bytes;
  }
  return parts;
}

// A collective in rounds through the segment.
class ShmCall final : public ExecutorCall {
 public:
  /// The segment and the guard outlive the executor's work on the call.
  ShmCall(ShmSegment& segment, CallGuard& guard, ShmCollective rounds,
          std::function<void()> copy_back)
      : segment_(segment),
        guard_(guard),
        rounds_(std::move(rounds)),
        copy_back_(std::move(copy_back)) {}

  bool advance(const WaitBudget& budget) override {
    for (;; ++round_) {
      if (!arrived_) {
        rounds_->fill(round_, segment_.next_slots());
        segment_.arrive(ticket.signature);
        arrived_ = true;
      }
      const auto outcome = segment_.await(budget, &guard_);
      if (outcome.fault == ShmFault::kPending) return false;
      if (outcome.fault != ShmFault::kNone) fail(outcome);
      try {
        rounds_->drain(round_, segment_.slots());
      } catch (const ShmDisagreement& disagreement) {
        guard_.fail(ticket, str(kind, ": ", disagreement.what, "."), disagreement.rank);
      }
      arrived_ = false;
      if (rounds_->last(round_)) break;
    }
    copy_back_();
    return true;
  }
  void release() noexcept override { copy_back_ = nullptr; }
  bool single_round() const noexcept override { return rounds_->last(0); }

 private:
  void fail(const ShmOutcome& outcome) {
    const auto why = str(kind, ": ", segment_.describe(outcome), ".");
    if (outcome.fault == ShmFault::kClosed) throw CommError(why);
    guard_.fail(ticket, why, outcome.rank);
  }

  ShmSegment& segment_;
  CallGuard& guard_;
  ShmCollective rounds_;
  std::function<void()> copy_back_;
  std::int64_t round_ = 0;
  bool arrived_ = false;
};

// The error of a message that has ended; null if it has arrived.
std::exception_ptr message_failure(bool sends, const at::Tensor& tensor, const ShmMessage& message,
                                   CallGuard& guard, const ShmSegment& segment) {
  const char* kind = sends ? "send" : "recv";
  if (!message.problem.empty()) {
    return std::make_exception_ptr(
        CommError(str(kind, ": ", message.problem, "."), message.source));
  }
  if (message.outcome.fault == ShmFault::kNone) return nullptr;
  const auto why = segment.describe(message.outcome);
  if (message.outcome.fault == ShmFault::kClosed) {
    return std::make_exception_ptr(CommError(str(kind, ": ", why, ".")));
  }
  return guard.failure_of(message_text(sends, tensor, message.peer), str(why, "."),
                          message.outcome.rank);
}

}  // namespace

// A collective, and the memory of its tensors.
struct ShmBackend::Call : BackendCall {
  using BackendCall::BackendCall;

  [[nodiscard]] ShmInput in(const at::Tensor& tensor) { return memory.in(facts.kind, tensor); }
  [[nodiscard]] ShmOutput out(const at::Tensor& tensor) { return memory.out(facts.kind, tensor); }
  [[nodiscard]] ShmOutput in_and_out(const at::Tensor& tensor) {
    return memory.in_and_out(facts.kind, tensor);
  }
  /// One tensor like `like` for each rank.
  [[nodiscard]] std::vector<ShmInput> in_each(const Tensors& list, const at::Tensor& like,
                                              int size) {
    check_count(facts.kind, "tensors", list.size(), size);
    std::vector<ShmInput> parts;
    for (const auto& tensor : list) {
      check_like(facts.kind, tensor, like);
      parts.push_back(in(tensor));
    }
    return parts;
  }
  [[nodiscard]] std::vector<ShmOutput> out_each(const Tensors& list, const at::Tensor& like,
                                                int size) {
    check_count(facts.kind, "tensors", list.size(), size);
    std::vector<ShmOutput> parts;
    for (const auto& tensor : list) {
      check_like(facts.kind, tensor, like);
      parts.push_back(out(tensor));
    }
    return parts;
  }

  ShmMemory memory = {};
};

ShmBackend::ShmBackend(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard,
                       const ShmOptions& options)
    : ExecutorBackend(segment->rank(), segment->size(), options.timeout, guard),
      segment_(std::move(segment)),
      guard_(std::move(guard)),
      mailbox_(std::make_shared<ShmMailbox>(segment_, guard_)),
      inline_bytes_(options.inline_bytes) {
  init();
}

void ShmBackend::close() noexcept {
  executor_->close([this] { segment_->close(); });
  mailbox_->close();
  segment_->leave();
}

c10d::ErrorType ShmBackend::getError() {
  const bool failed = guard_->failed() || segment_->reported_fault().fault != ShmFault::kNone;
  return failed ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

ShmBackend::WorkPtr ShmBackend::start(Call call, ShmCollective rounds) {
  const auto schedule = !call.asynchronous                     ? Schedule::kInline
                        : call.memory.bytes() <= inline_bytes_ ? Schedule::kStartInline
                                                               : Schedule::kBackground;
  const ExecutorCallPtr executed = std::make_shared<ShmCall>(*segment_, *guard_, std::move(rounds),
                                                             std::move(call.memory).copy_back());
  return submit(std::move(call), executed, schedule);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto& tensor = only_one(tensors, "all_reduce");
  Call call(OpType::ALLREDUCE, "all_reduce", options, tensors);
  auto rounds = all_reduce(call, tensor, options.reduceOp);
  return start(std::move(call), std::move(rounds));
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);  // throws: the tensor must be dense
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Call call(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", options, tensors);
  std::vector<ShmCollective> parts;
  for (const auto& tensor : tensors) parts.push_back(all_reduce(call, tensor, options.reduceOp));
  return start(std::move(call), shm_in_turn(std::move(parts)));
}

ShmCollective ShmBackend::all_reduce(Call& call, const at::Tensor& tensor,
                                     const c10d::ReduceOp& operation) {
  call.facts.add(tensor);
  const auto arithmetic = arithmetic_of(call.facts.kind, tensor, operation);
  const auto data = call.in_and_out(tensor);
  return shm_all_reduce(as_input(data), data, arithmetic, *segment_);
}

void ShmBackend::all_reduce_into(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceOp& operation) {
  c10d::AllreduceOptions options;
  options.reduceOp = operation;
  options.asyncOp = false;
  Call call(OpType::ALLREDUCE, "all_reduce", options, {output});
  call.facts.add(input);
  check_dtype(call.facts.kind, output, input);
  const auto in = call.in(input);
  const auto out = call.out(output);
  const auto arithmetic = arithmetic_of(call.facts.kind, input, operation);
  start(std::move(call), shm_all_reduce(in, out, arithmetic, *segment_))->wait();
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const char* kind = "reduce";
  const auto& tensor = only_one(tensors, kind);
  check_rank(kind, "root", options.rootRank, size_);
  Call call(OpType::REDUCE, kind, options, tensors);
  call.facts.add(tensor);
  const auto arithmetic = arithmetic_of(kind, tensor, options.reduceOp);
  const auto data = call.in_and_out(tensor);
  const int root = call.facts.root;
  return start(std::move(call), shm_reduce(data, arithmetic, root, *segment_));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const char* kind = "reduce_scatter";
  const auto& output = only_one(outputs, kind);
  Call call(OpType::REDUCE_SCATTER, kind, options, outputs);
  call.facts.add(output);
  auto parts = call.in_each(only_one(inputs, kind), output, size_);
  const auto arithmetic = arithmetic_of(kind, output, options.reduceOp);
  const auto out = call.out(output);
  return start(std::move(call), shm_reduce_scatter(std::move(parts), out, arithmetic, *segment_));
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const char* kind = "reduce_scatter";
  check_pairs(kind, outputs, inputs);
  Call call(OpType::_REDUCE_SCATTER_BASE, kind, options, outputs);
  std::vector<ShmCollective> parts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_whole(kind, inputs[i], outputs[i], size_);
    call.facts.add(outputs[i]);
    const auto arithmetic = arithmetic_of(kind, outputs[i], options.reduceOp);
    auto of_ranks = parts_of(call.in(inputs[i]), size_);
    parts.push_back(
        shm_reduce_scatter(std::move(of_ranks), call.out(outputs[i]), arithmetic, *segment_));
  }
  return start(std::move(call), shm_in_turn(std::move(parts)));
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const char* kind = "broadcast";
  const auto& tensor = only_one(tensors, kind);
  check_rank(kind, "root", options.rootRank, size_);
  Call call(OpType::BROADCAST, kind, options, tensors);
  call.facts.add(tensor);
  const auto data = call.in_and_out(tensor);
  const int root = call.facts.root;
  return start(std::move(call), shm_broadcast(data, root, *segment_));
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather";
  const auto& input = only_one(inputs, kind);
  const auto& list = only_one(outputs, kind);
  Call call(OpType::ALLGATHER, kind, options, list);
  call.facts.add(input);
  auto parts = call.out_each(list, input, size_);
  const auto in = call.in(input);
  return start(std::move(call), shm_gather(in, std::move(parts), *segment_));
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather";
  check_pairs(kind, outputs, inputs);
  Call call(OpType::_ALLGATHER_BASE, kind, options, outputs);
  std::vector<ShmCollective> parts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_whole(kind, outputs[i], inputs[i], size_);
    call.facts.add(inputs[i]);
    auto of_ranks = parts_of(call.out(outputs[i]), size_);
    parts.push_back(shm_gather(call.in(inputs[i]), std::move(of_ranks), *segment_));
  }
  return start(std::move(call), shm_in_turn(std::move(parts)));
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather_coalesced";
  check_count(kind, "lists of tensors", outputs.size(), size_);
  Call call(OpType::ALLGATHER_COALESCED, kind, options);
  for (const auto& list : outputs) {
    check_pairs(kind, list, inputs);
    call.results.insert(call.results.end(), list.begin(), list.end());
  }
  std::vector<ShmCollective> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.facts.add(inputs[i]);
    Tensors of_ranks;
    for (const auto& list : outputs) of_ranks.push_back(list[i]);
    auto out = call.out_each(of_ranks, inputs[i], size_);
    parts.push_back(shm_gather(call.in(inputs[i]), std::move(out), *segment_));
  }
  return start(std::move(call), shm_in_turn(std::move(parts)));
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const char* kind = "gather";
  const auto& input = only_one(inputs, kind);
  check_rank(kind, "root", options.rootRank, size_);
  Call call(OpType::GATHER, kind, options);
  call.facts.add(input);
  std::vector<ShmOutput> parts;
  if (rank_ == options.rootRank) {
    call.results = only_one(outputs, kind);
    parts = call.out_each(call.results, input, size_);
  } else if (!outputs.empty()) {
    throw ArgumentError(str(kind, ": rank ", rank_, " gave tensors for the result, but only rank ",
                            options.rootRank, ", the root, gets it. Pass an empty list."));
  }
  const auto in = call.in(input);
  return start(std::move(call), shm_gather(in, std::move(parts), *segment_));
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const char* kind = "scatter";
  const auto& output = only_one(outputs, kind);
  check_rank(kind, "root", options.rootRank, size_);
  Call call(OpType::SCATTER, kind, options, outputs);
  call.facts.add(output);
  const int root = call.facts.root;
  std::vector<ShmInput> parts;
  if (rank_ == root) {
    parts = call.in_each(only_one(inputs, kind), output, size_);
  } else if (!inputs.empty()) {
    throw ArgumentError(str(kind, ": rank ", rank_, " gave tensors to scatter, but only those of ",
                            "rank ", root, ", the root, are used. Pass an empty list."));
  }
  const auto out = call.out(output);
  return start(std::move(call), shm_scatter(std::move(parts), out, root, *segment_));
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  const char* kind = "all_to_all";
  check_count(kind, "tensors to send", inputs.size(), size_);
  check_count(kind, "tensors to receive", outputs.size(), size_);
  Call call(OpType::ALLTOALL, kind, options, outputs);
  call.facts.dtype = dtype_literal(inputs.front().scalar_type());
  std::vector<ShmInput> in;
  std::vector<ShmOutput> out;
  for (int rank = 0; rank < size_; ++rank) {
    check_dtype(kind, inputs[rank], inputs.front());
    check_dtype(kind, outputs[rank], inputs.front());
    in.push_back(call.in(inputs[rank]));
    out.push_back(call.out(outputs[rank]));
  }
  return start(std::move(call), shm_all_to_all(std::move(in), std::move(out), *segment_));
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  const char* kind = "all_to_all";
  check_dtype(kind, output, input);
  Call call(OpType::ALLTOALL_BASE, kind, options, {output});
  call.facts.dtype = dtype_literal(input.scalar_type());
  auto in = rows_of(kind, call.in(input), input, input_splits, size_);
  auto out = rows_of(kind, call.out(output), output, output_splits, size_);
  return start(std::move(call), shm_all_to_all(std::move(in), std::move(out), *segment_));
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(Call(OpType::BARRIER, "barrier", options), shm_barrier());
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_for_all*/) {
  barrier(options)->wait();
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int receiver, int tag) {
  check_rank("send", "receiver", receiver, size_);
  return post(tensors, receiver, tag, OpType::SEND);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int sender, int tag) {
  check_rank("recv", "sender", sender, size_);
  return post(tensors, sender, tag, OpType::RECV);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return post(tensors, -1, tag, OpType::RECVANYSOURCE);
}

ShmBackend::WorkPtr ShmBackend::post(Tensors& tensors, int peer, int tag, OpType type) {
  const bool sends = type == OpType::SEND;
  const char* kind = sends ? "send" : "recv";
  const auto& tensor = only_one(tensors, kind);
  ShmMemory memory;
  auto message = std::make_shared<ShmMessage>();
  message->peer = peer;
  message->tag = tag;
  message->type = static_cast<std::uint32_t>(tensor.scalar_type());
  message->timeout = timeout_of(c10d::kUnsetTimeout);
  if (sends) {
    const auto in = memory.in(kind, tensor);
    message->data = const_cast<std::byte*>(in.data);  // a message to be sent is only read
    message->bytes = in.bytes;
  } else {
    const auto out = memory.out(kind, tensor);
    message->data = out.data;
    message->bytes = out.bytes;
  }
  const auto work = c10::make_intrusive<ShmMessageWork>(
      BackendWork::Info{rank_, type, kind, tensors, 0}, mailbox_, message);
  message->on_done = [work, sends, tensor, guard = guard_, segment = segment_,
                      copy_back = std::move(memory).copy_back()](ShmMessage& ended) {
    auto error = message_failure(sends, tensor, ended, *guard, *segment);
    if (!error && copy_back) copy_back();
    work->settle(error);
  };
  if (sends) {
    mailbox_->send(message);
  } else {
    mailbox_->receive(message);
  }
  return work;
}

}  // namespace accelerate::detail::comm
