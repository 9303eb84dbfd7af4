// src/parallel/drift_watch.h - compares the parameters of a model across processes while it trains.
//
// Processes that begin with the same parameters and average their gradients keep the same
// parameters. If they do not, something trains another model than the user believes. So each
// averaged backward compares a part of the parameters: the elements are cut into windows that take
// turns, each process sums up one window, parameter by parameter, and the sums travel in one small
// message. Every element is compared within 50 backward passes, or with more than 800 parameters
// within one pass over them, 16 at a time.
//
//     before a step of an optimizer:   watch.sum_up();
//     at the end of each backward:     watch.exchange();
//
// The sums are taken before the step if there is one: some optimizers (SAM) give each process
// weights of its own for a backward and restore them before they step.
//
// In shared memory the message takes a microsecond, and its result is compared at once. Elsewhere
// eight windows share a message without a wait; its result is read at a later backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::parallel {

/// The parameters of a model, by name.
struct Parameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;

  [[nodiscard]] std::size_t size() const { return tensors.size(); }
  void add(const std::string& name, const at::Tensor& tensor) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
};

/// The ranks whose sum differs from the sum that most ranks have (if several are as frequent, that
/// of the lowest rank). `sums` are not negative; two of them are equal if they differ by at most
/// `tolerance` times the larger one or `scale`, or are both NaN, or both infinite.
[[nodiscard]] ACCELERATE_API std::vector<int> ranks_that_differ(std::span<const double> sums,
                                                                double tolerance, double scale = 0);

class DriftWatch {
 public:
  /// Parameters must be equal on all processes now. `interval`: the averaged backward passes from
  /// one comparison to the next, 1 or more. Dense parameters of floating point or complex numbers
  /// are watched that are on the device of the first of them.
  DriftWatch(Parameters parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
             std::int64_t interval);

  /// Sums up what the next message compares, unless this has been done since the last one.
  void sum_up();
  /// The loss of the backward that is about to run. Processes whose losses agree to the last bit,
  /// step after step, train on the same data; that is warned of once.
  void note_loss(const at::Tensor& loss);
  /// Collective. To be called at the end of each averaged backward. Throws `CommError` that names
  /// the parameter, the ranks and the backward if parameters differ.
  void exchange();

  /// While processes may differ nothing is summed up or sent.
  void pause() noexcept;
  void resume() noexcept;

 private:
  /// Rows of one parameter, along its first dimension.
  struct Chunk {
    std::size_t parameter = 0;
    std::int64_t first = 0;
    std::int64_t rows = 0;
    std::int64_t elements = 0;
    /// The largest sum that any process has sent: elements that have become small are as exact as
    /// they were when they were large.
    double scale = 0;
  };
  using Window = std::vector<Chunk>;

  /// A message whose result has not been compared yet.
  struct Message {
    std::size_t window = 0;  // its first one
    std::int64_t backward = 0;
    c10::intrusive_ptr<c10d::Work> work = nullptr;
    at::Tensor own = {};
    at::Tensor all = {};  // [processes * slots]
    /// `all` in host memory is complete when `copied` is.
    std::optional<c10::Event> copied = std::nullopt;
  };

  void make_windows();
  [[nodiscard]] bool is_due(std::int64_t backward) const { return backward % every_ == 0; }
  template <class F>
  void for_each_chunk(std::size_t window, F&& f);
  [[nodiscard]] at::Tensor view_of(const Chunk& chunk) const;
  [[nodiscard]] double sum_of(const Chunk& chunk) const;
  void sum_up_on_host();
  void sum_up_on_device();
  void send();
  void receive();
  [[nodiscard]] static bool is_here(Message& message);
  void compare(const Message& message);
  void compare_losses(std::span<const double> losses);
  [[noreturn]] void report(const Chunk& chunk, std::span<const double> sums,
                           const std::vector<int>& ranks, const Message& message) const;

  Parameters parameters_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::Device device_;
  bool waits_ = false;  // for each message: it takes a microsecond
  std::size_t windows_per_message_ = 1;
  std::int64_t every_ = 1;
  std::vector<Window> windows_ = {};
  std::size_t chunks_ = 0;  // of the largest window
  std::size_t next_ = 0;    // the window that is compared next
  std::int64_t backwards_ = 0;
  bool paused_ = false;
  bool is_summed_ = false;
  double loss_on_host_ = 0;
  at::Tensor loss_on_device_ = {};
  at::Tensor own_ = {};  // [slots]: the loss, then a sum per chunk
  at::Tensor all_ = {};
  std::deque<Message> messages_ = {};
  double last_loss_ = 0;
  int same_losses_ = 0;
};

}  // namespace accelerate::detail::parallel
