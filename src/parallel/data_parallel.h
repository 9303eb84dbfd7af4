// src/parallel/data_parallel.h - a module whose gradients are averaged over processes in backward.
//
// Python's `DistributedDataParallel`, with one difference: whether gradients are averaged is
// decided where backward is called, not where forward was.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "accelerate/api.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs.h"
#include "parallel/engine.h"

namespace accelerate::detail::parallel {

class ACCELERATE_API DataParallel final : public Engine, public Joinable {
 public:
  /// Collective. Gives all processes the parameters and buffers of process 0. Throws `CommError`
  /// that names the first parameter which another process does not have in the same way, and
  /// `ArgumentError` if no parameter requires a gradient. Every `drift_check`th averaged backward
  /// compares some parameters across processes, none if it is 0; see drift_watch.h.
  DataParallel(const torch::nn::Module& module, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
               const DistributedDataParallelKwargs& options, std::int64_t drift_check = 1);
  ~DataParallel() override;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  [[nodiscard]] std::string_view wrapper_prefix() const override { return "module."; }
  [[nodiscard]] bool is_static() const override;
  [[nodiscard]] bool reached_by(const ReachedLeaves& leaves) const override;

  /// Throws `ArgumentError` that names the parameters which the loss does not reach, unless
  /// `find_unused_parameters` is set. With `static_graph` the first such backward finds out what is
  /// reached, and later ones must reach the same.
  void before_backward(const BackwardPass& pass) override;

  /// Collective: gradients that were not sent during backward are averaged, and buffers broadcast
  /// from process 0. Throws `ArgumentError` if a parameter got a gradient that, by `static_graph`,
  /// never gets one, and `CommError` if the parameters of the processes differ.
  void after_backward() override;

  [[nodiscard]] bool holds(const at::Tensor& parameter) const override;
  void before_step() override;

  [[nodiscard]] bool can_rebuild() const override { return true; }
  /// Collective. Checks that the processes agree, gives all of them the parameters and buffers of
  /// process 0, and forgets what static graphs and compression had learned. Gradients of an old
  /// shape are dropped. No graph of an earlier forward may be used afterwards.
  void rebuild() override;

  [[nodiscard]] Joinable* joinable() override { return this; }
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& group() const override;
  [[nodiscard]] std::int64_t announcement(const ReachedLeaves& leaves) const override;
  void begin_joined(const JoinedBackward& backward) override;
  void shadow(std::int64_t announcement) override;
  void broadcast_from(int source) override;
  void end_joined() noexcept override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate::detail::parallel
