#include "comm/shm_backend.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "comm/call_checks.h"
#include "comm/call_facts.h"
#include "comm/shm_collectives.h"
#include "comm/shm_tensors.h"
#include "comm/shm_work.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using OpType = c10d::OpType;

template <class Whole, class Part>
std::vector<Part> parts_of(const Whole& whole, int size) {
  std::vector<Part> parts;
  const auto bytes = whole.bytes / static_cast<std::size_t>(size);
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back({whole.data + bytes * static_cast<std::size_t>(rank), bytes});
  }
  return parts;
}

// The rows of a tensor, dealt out as `splits` says; evenly when it says nothing.
template <class Whole, class Part>
std::vector<Part> rows_of(const char* kind, const Whole& whole, const at::Tensor& tensor,
                          const std::vector<std::int64_t>& splits, int size) {
  const auto rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  if (splits.empty()) {
    if (rows % size == 0) return parts_of<Whole, Part>(whole, size);
    throw ArgumentError(str(kind, ": ", rows, " rows cannot be dealt out evenly to ", size,
                            " ranks. Say how many each gets."));
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

// What has become of a message; null when it has arrived.
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

// A collective as the caller has asked for it.
struct ShmBackend::Call {
  OpType type;
  GatheredFacts facts;
  ShmCollective rounds = {};
  Tensors results = {};
  ShmMemory memory = {};
  bool asynchronous = true;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};

ShmBackend::ShmBackend(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard,
                       const ShmOptions& options)
    : c10d::Backend(segment->rank(), segment->size()),
      segment_(std::move(segment)),
      guard_(std::move(guard)),
      lane_(std::make_shared<ShmLane>(segment_, guard_)),
      mailbox_(std::make_shared<ShmMailbox>(segment_, guard_)),
      timeout_(options.timeout),
      inline_bytes_(options.inline_bytes) {
  init();
}

ShmBackend::~ShmBackend() { close(); }

void ShmBackend::close() noexcept {
  lane_->close();
  mailbox_->close();
  segment_->leave();
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) { timeout_.store(timeout); }

c10d::ErrorType ShmBackend::getError() {
  const bool failed = guard_->failed() || segment_->told().fault != ShmFault::kNone;
  return failed ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

ShmBackend::WorkPtr ShmBackend::start(Call call) {
  auto operation = std::make_shared<ShmOperation>();
  operation->rounds = std::move(call.rounds);
  operation->kind = call.facts.kind;
  operation->timeout = chosen_timeout(call.timeout, timeout_.load());
  const auto bytes = call.memory.bytes();
  operation->after = std::move(call.memory).copy_back();
  operation->ticket = guard_->enter(call.facts.all());
  const auto work = c10::make_intrusive<ShmCollectiveWork>(
      ShmWork::About{rank_, call.type, call.facts.kind, std::move(call.results), ++sequence_},
      lane_, operation);
  operation->settle = [work](const std::exception_ptr& error) { work->settle(error); };
  try {
    lane_->submit(operation, !call.asynchronous       ? ShmHaste::kNow
                             : bytes <= inline_bytes_ ? ShmHaste::kSoon
                                                      : ShmHaste::kLater);
  } catch (...) {
    operation->settle = nullptr;
    guard_->leave(operation->ticket);
    throw;
  }
  return work;
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const char* kind = "all_reduce";
  const auto& tensor = only_one(tensors, kind);
  Call call{.type = OpType::ALLREDUCE,
            .facts = {.kind = kind, .reduction = options.reduceOp.op_},
            .results = tensors,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(tensor);
  const auto arithmetic = arithmetic_of(kind, tensor, options.reduceOp);
  const auto data = call.memory.in_and_out(kind, tensor);
  call.rounds = shm_all_reduce(as_input(data), data, arithmetic, *segment_);
  return start(std::move(call));
}

void ShmBackend::all_reduce_into(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceOp& operation) {
  const char* kind = "all_reduce";
  Call call{.type = OpType::ALLREDUCE,
            .facts = {.kind = kind, .reduction = operation.op_},
            .results = {output},
            .asynchronous = false};
  call.facts.about(input);
  check_dtype(kind, output, input);
  const auto in = call.memory.in(kind, input);
  const auto out = call.memory.out(kind, output);
  call.rounds = shm_all_reduce(in, out, arithmetic_of(kind, input, operation), *segment_);
  start(std::move(call))->wait();
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);  // says that it has to be dense
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const char* kind = "all_reduce_coalesced";
  Call call{.type = OpType::ALLREDUCE_COALESCED,
            .facts = {.kind = kind, .reduction = options.reduceOp.op_},
            .results = tensors,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  std::vector<ShmCollective> parts;
  for (const auto& tensor : tensors) {
    call.facts.about(tensor);
    const auto arithmetic = arithmetic_of(kind, tensor, options.reduceOp);
    const auto data = call.memory.in_and_out(kind, tensor);
    parts.push_back(shm_all_reduce(as_input(data), data, arithmetic, *segment_));
  }
  call.rounds = shm_in_turn(std::move(parts));
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const char* kind = "reduce";
  const auto& tensor = only_one(tensors, kind);
  check_rank(kind, "root", options.rootRank, size_);
  const auto root = static_cast<int>(options.rootRank);
  Call call{.type = OpType::REDUCE,
            .facts = {.kind = kind, .reduction = options.reduceOp.op_, .root = root},
            .results = tensors,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(tensor);
  const auto arithmetic = arithmetic_of(kind, tensor, options.reduceOp);
  call.rounds = shm_reduce(call.memory.in_and_out(kind, tensor), arithmetic, root, *segment_);
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const char* kind = "reduce_scatter";
  const auto& output = only_one(outputs, kind);
  const auto& list = only_one(inputs, kind);
  check_count(kind, "tensors", list.size(), size_);
  Call call{.type = OpType::REDUCE_SCATTER,
            .facts = {.kind = kind, .reduction = options.reduceOp.op_},
            .results = outputs,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(output);
  std::vector<ShmInput> parts;
  for (const auto& tensor : list) {
    check_like(kind, tensor, output);
    parts.push_back(call.memory.in(kind, tensor));
  }
  const auto arithmetic = arithmetic_of(kind, output, options.reduceOp);
  call.rounds =
      shm_reduce_scatter(std::move(parts), call.memory.out(kind, output), arithmetic, *segment_);
  return start(std::move(call));
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
  Call call{.type = OpType::_REDUCE_SCATTER_BASE,
            .facts = {.kind = kind, .reduction = options.reduceOp.op_},
            .results = outputs,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  std::vector<ShmCollective> parts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_whole(kind, inputs[i], outputs[i], size_);
    call.facts.about(outputs[i]);
    const auto arithmetic = arithmetic_of(kind, outputs[i], options.reduceOp);
    auto of_ranks = parts_of<ShmInput, ShmInput>(call.memory.in(kind, inputs[i]), size_);
    parts.push_back(shm_reduce_scatter(std::move(of_ranks), call.memory.out(kind, outputs[i]),
                                       arithmetic, *segment_));
  }
  call.rounds = shm_in_turn(std::move(parts));
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const char* kind = "broadcast";
  const auto& tensor = only_one(tensors, kind);
  check_rank(kind, "root", options.rootRank, size_);
  const auto root = static_cast<int>(options.rootRank);
  Call call{.type = OpType::BROADCAST,
            .facts = {.kind = kind, .root = root},
            .results = tensors,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(tensor);
  call.rounds = shm_broadcast(call.memory.in_and_out(kind, tensor), root, *segment_);
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather";
  const auto& input = only_one(inputs, kind);
  const auto& list = only_one(outputs, kind);
  check_count(kind, "tensors", list.size(), size_);
  Call call{.type = OpType::ALLGATHER,
            .facts = {.kind = kind},
            .results = list,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(input);
  std::vector<ShmOutput> parts;
  for (const auto& tensor : list) {
    check_like(kind, tensor, input);
    parts.push_back(call.memory.out(kind, tensor));
  }
  call.rounds = shm_gather(call.memory.in(kind, input), std::move(parts), *segment_);
  return start(std::move(call));
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
  Call call{.type = OpType::_ALLGATHER_BASE,
            .facts = {.kind = kind},
            .results = outputs,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  std::vector<ShmCollective> parts;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_whole(kind, outputs[i], inputs[i], size_);
    call.facts.about(inputs[i]);
    auto of_ranks = parts_of<ShmOutput, ShmOutput>(call.memory.out(kind, outputs[i]), size_);
    parts.push_back(shm_gather(call.memory.in(kind, inputs[i]), std::move(of_ranks), *segment_));
  }
  call.rounds = shm_in_turn(std::move(parts));
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  const char* kind = "all_gather_coalesced";
  check_count(kind, "lists of tensors", outputs.size(), size_);
  Call call{.type = OpType::ALLGATHER_COALESCED,
            .facts = {.kind = kind},
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  for (const auto& list : outputs) {
    check_pairs(kind, list, inputs);
    call.results.insert(call.results.end(), list.begin(), list.end());
  }
  std::vector<ShmCollective> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.facts.about(inputs[i]);
    std::vector<ShmOutput> of_ranks;
    for (const auto& list : outputs) {
      check_like(kind, list[i], inputs[i]);
      of_ranks.push_back(call.memory.out(kind, list[i]));
    }
    parts.push_back(shm_gather(call.memory.in(kind, inputs[i]), std::move(of_ranks), *segment_));
  }
  call.rounds = shm_in_turn(std::move(parts));
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const char* kind = "gather";
  const auto& input = only_one(inputs, kind);
  check_rank(kind, "root", options.rootRank, size_);
  Call call{.type = OpType::GATHER,
            .facts = {.kind = kind, .root = static_cast<int>(options.rootRank)},
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(input);
  std::vector<ShmOutput> parts;
  if (rank_ == options.rootRank) {
    call.results = only_one(outputs, kind);
    check_count(kind, "tensors", call.results.size(), size_);
    for (const auto& tensor : call.results) {
      check_like(kind, tensor, input);
      parts.push_back(call.memory.out(kind, tensor));
    }
  } else if (!outputs.empty()) {
    throw ArgumentError(str(kind, ": rank ", rank_, " gave tensors for the result, but only rank ",
                            options.rootRank, ", the root, gets it. Pass an empty list."));
  }
  call.rounds = shm_gather(call.memory.in(kind, input), std::move(parts), *segment_);
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const char* kind = "scatter";
  const auto& output = only_one(outputs, kind);
  check_rank(kind, "root", options.rootRank, size_);
  const auto root = static_cast<int>(options.rootRank);
  Call call{.type = OpType::SCATTER,
            .facts = {.kind = kind, .root = root},
            .results = outputs,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  call.facts.about(output);
  std::vector<ShmInput> parts;
  if (rank_ == root) {
    const auto& list = only_one(inputs, kind);
    check_count(kind, "tensors", list.size(), size_);
    for (const auto& tensor : list) {
      check_like(kind, tensor, output);
      parts.push_back(call.memory.in(kind, tensor));
    }
  } else if (!inputs.empty()) {
    throw ArgumentError(str(kind, ": rank ", rank_, " gave tensors to scatter, but only those of ",
                            "rank ", root, ", the root, are used. Pass an empty list."));
  }
  call.rounds = shm_scatter(std::move(parts), call.memory.out(kind, output), root, *segment_);
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  const char* kind = "all_to_all";
  check_count(kind, "tensors to send", inputs.size(), size_);
  check_count(kind, "tensors to receive", outputs.size(), size_);
  Call call{.type = OpType::ALLTOALL,
            .facts = {.kind = kind, .dtype = dtype_literal(inputs.front().scalar_type())},
            .results = outputs,
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  std::vector<ShmInput> in;
  std::vector<ShmOutput> out;
  for (int rank = 0; rank < size_; ++rank) {
    check_dtype(kind, inputs[rank], inputs.front());
    check_dtype(kind, outputs[rank], inputs.front());
    in.push_back(call.memory.in(kind, inputs[rank]));
    out.push_back(call.memory.out(kind, outputs[rank]));
  }
  call.rounds = shm_all_to_all(std::move(in), std::move(out), *segment_);
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  const char* kind = "all_to_all";
  check_dtype(kind, output, input);
  Call call{.type = OpType::ALLTOALL_BASE,
            .facts = {.kind = kind, .dtype = dtype_literal(input.scalar_type())},
            .results = {output},
            .asynchronous = options.asyncOp,
            .timeout = options.timeout};
  auto in =
      rows_of<ShmInput, ShmInput>(kind, call.memory.in(kind, input), input, input_splits, size_);
  auto out = rows_of<ShmOutput, ShmOutput>(kind, call.memory.out(kind, output), output,
                                           output_splits, size_);
  call.rounds = shm_all_to_all(std::move(in), std::move(out), *segment_);
  return start(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start({.type = OpType::BARRIER,
                .facts = {.kind = "barrier"},
                .rounds = shm_barrier(),
                .asynchronous = options.asyncOp,
                .timeout = options.timeout});
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
  message->timeout = chosen_timeout(c10d::kUnsetTimeout, timeout_.load());
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
      ShmWork::About{rank_, type, kind, tensors, 0}, mailbox_, message);
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

}  // namespace accelerate::detail
