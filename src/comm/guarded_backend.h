// src/comm/guarded_backend.h - a backend of c10d whose collectives are announced to a guard.
//
// Internal. Describes each collective for the guard, once for all backends; the derived class
// starts it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/call_facts.h"

namespace accelerate::detail::comm {

/// `Base` is a class of c10d: ProcessGroupGloo or ProcessGroupNCCL.
template <class Base>
class GuardedBackend : public Base {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  using Base::Base;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start_guarded(facts("broadcast", tensors, -1, static_cast<int>(options.rootRank)),
                         [&] { return Base::broadcast(tensors, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start_guarded(facts("all_reduce", tensors, number(options.reduceOp)),
                         [&] { return Base::allreduce(tensors, options); });
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    // Ranks may hold different numbers of entries; the shape is that of the dense tensor.
    return start_guarded(facts("all_reduce of sparse", tensors, number(options.reduceOp)),
                         [&] { return Base::allreduce_sparse(tensors, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return start_guarded(
        several("all_reduce of several", tensors, number(options.reduceOp)).facts(),
        [&] { return Base::allreduce_coalesced(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start_guarded(
        facts("reduce", tensors, number(options.reduceOp), static_cast<int>(options.rootRank)),
        [&] { return Base::reduce(tensors, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return start_guarded(facts_of("reduce_scatter", input, number(options.reduceOp)),
                         [&] { return Base::_reduce_scatter_base(output, input, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return start_guarded(facts("reduce_scatter of lists", outputs, number(options.reduceOp)),
                         [&] { return Base::reduce_scatter(outputs, inputs, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return start_guarded(
        several("reduce_scatter of several", inputs, number(options.reduceOp)).facts(),
        [&] { return Base::reduce_scatter_tensor_coalesced(outputs, inputs, options); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return start_guarded(facts_of("all_gather", input),
                         [&] { return Base::_allgather_base(output, input, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return start_guarded(facts("all_gather to lists", inputs),
                         [&] { return Base::allgather(outputs, inputs, options); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return start_guarded(several("all_gathers to lists", inputs).facts(),
                         [&] { return Base::allgather_coalesced(outputs, inputs, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return start_guarded(several("all_gather of several", inputs).facts(), [&] {
      return Base::allgather_into_tensor_coalesced(outputs, inputs, options);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return start_guarded(facts("gather to one", inputs, -1, static_cast<int>(options.rootRank)),
                         [&] { return Base::gather(outputs, inputs, options); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    return start_guarded(facts("scatter", outputs, -1, static_cast<int>(options.rootRank)),
                         [&] { return Base::scatter(outputs, inputs, options); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    // The tensors may have any sizes that fit in pairs.
    return start_guarded(uneven("all_to_all of lists", inputs.empty() ? nullptr : &inputs.front()),
                         [&] { return Base::alltoall(outputs, inputs, options); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& out_counts, std::vector<std::int64_t>& in_counts,
                        const c10d::AllToAllOptions& options) override {
    // With split counts the ranks may hold tensors of different sizes.
    const bool even = out_counts.empty() && in_counts.empty();
    return start_guarded(
        even ? facts_of("all_to_all", input) : uneven("all_to_all of different sizes", &input),
        [&] { return Base::alltoall_base(output, input, out_counts, in_counts, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start_guarded({.kind = "barrier"}, [&] { return Base::barrier(options); });
  }

 protected:
  /// Announces and starts a collective; throws if the group has failed.
  virtual WorkPtr start_guarded(const CallFacts& call, c10::function_ref<WorkPtr()> start) = 0;

  static int number(const c10d::ReduceOp& reduction) {
    return static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(reduction.op_));
  }
  static CallFacts facts(const char* kind, const Tensors& tensors, int reduction = -1,
                         int root = -1) {
    if (!tensors.empty()) return facts_of(kind, tensors.front(), reduction, root);
    return {.kind = kind, .reduction = reduction, .root = root};
  }
  /// The facts of a call on all of `tensors`.
  static CallFactsBuilder several(const char* kind, const Tensors& tensors, int reduction = -1) {
    CallFactsBuilder all{.kind = kind, .reduction = reduction};
    for (const auto& tensor : tensors) all.add(tensor);
    return all;
  }

 private:
  static CallFacts uneven(const char* kind, const at::Tensor* tensor) {
    return {.kind = kind, .dtype = tensor ? dtype_literal(tensor->scalar_type()) : ""};
  }
};

}  // namespace accelerate::detail::comm
