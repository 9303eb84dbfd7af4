#include "parallel/drift_watch.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/state/gradient_state.h"
#include "comm/peers.h"
#include "core/log.h"
#include "core/text.h"
#include "core/uncaught.h"

namespace accelerate::detail::parallel {
namespace {

// A pass over all windows, and what waits for a message of eight of them, is within 50 backward
// passes. One window is 1/40 of the elements. A step reads and writes each of them ten times or
// more (forward, backward, averaging, optimizer), so that their sums are below 0.3 % of it.
constexpr std::int64_t kWindows = 40;
constexpr std::size_t kWindowsPerMessage = 8;
// Small parameters cost a call each, and a place in the message.
constexpr std::size_t kMostChunks = 16;
// Losses that are the same by chance are not for so long.
constexpr int kSameLosses = 10;

bool is_watched(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.is_nested()) return false;
  if (tensor.layout() != at::kStrided || tensor.numel() == 0 || tensor.is_conj()) return false;
  const auto dtype = tensor.scalar_type();
  return c10::isComplexType(dtype) || (c10::isFloatingType(dtype) && !c10::isFloat8Type(dtype));
}

/// Those of one device, that of the first one: a message has one.
Parameters watched(const Parameters& all) {
  Parameters result;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& tensor = all.tensors[i];
    if (!is_watched(tensor)) continue;
    if (result.size() > 0 && tensor.device() != result.tensors[0].device()) continue;
    result.add(all.names[i], tensor);
  }
  return result;
}

std::int64_t rows_of(const at::Tensor& tensor) { return tensor.dim() == 0 ? 1 : tensor.size(0); }

// What is summed up is |x| + kSlant * x. Magnitudes show elements that grow or shrink, and are
// never negative, so that the sum is its own scale; the slant shows those that move or change their
// sign.
constexpr double kSlant = 0.618;

template <class T>
T term(T x) {
  return std::abs(x) + static_cast<T>(kSlant) * x;
}

/// The sum of terms, in the order of memory: the same bits on all processors of a family.
template <class T>
double sum_of_terms(const T* data, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;
  constexpr std::int64_t kBlock = 64 * kLanes;  // short sums lose no precision in float
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(begin + kBlock, count);
    std::array<Sum, kLanes> lanes{};
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        lanes[static_cast<std::size_t>(lane)] += term(static_cast<Sum>(data[i + lane]));
      }
    }
    for (; i < end; ++i) total += term(static_cast<Sum>(data[i]));
    for (const Sum lane : lanes) total += lane;
  }
  return total;
}

/// The dtype of sums that ATen computes.
std::optional<at::ScalarType> sum_dtype(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kDouble) return std::nullopt;
  return at::kFloat;
}

/// How far equal parameters can be apart: optimizers round differently on processors of different
/// kinds, by a bit of some elements in each step, up or down.
double tolerance_of(const at::Tensor& parameter, std::int64_t elements) {
  const auto dtype = c10::toRealValueType(parameter.scalar_type());
  if (dtype == at::kDouble) return 1e-9;
  double one = 1024 * double{std::numeric_limits<float>::epsilon()};
  if (dtype == at::kHalf) one = 16 * 0x1p-10;
  if (dtype == at::kBFloat16) one = 16 * 0x1p-7;
  return std::max(2e-5, one / std::sqrt(static_cast<double>(elements)));
}

bool are_equal(double a, double b, double tolerance, double scale) {
  if (!std::isfinite(a) || !std::isfinite(b)) return std::isnan(a) ? std::isnan(b) : a == b;
  return std::abs(a - b) <= tolerance * std::max({a, b, scale});
}

/// A loader that is prepared is being iterated: whether processes get the same batches is its
/// business.
bool in_prepared_loader() {
  return GradientState::initialized() && GradientState().in_dataloader();
}

/// "rank 1", "ranks 1 and 3", "ranks 1, 2 and 3".
std::string rank_list(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return str("rank ", ranks[0]);
  const std::vector<int> first(ranks.begin(), ranks.end() - 1);
  return str("ranks ", join(first), " and ", ranks.back());
}

}  // namespace

std::vector<int> ranks_that_differ(std::span<const double> sums, double tolerance, double scale) {
  const auto size = static_cast<int>(sums.size());
  std::vector<int> fewest;
  for (int reference = 0; reference < size; ++reference) {
    std::vector<int> others;
    for (int rank = 0; rank < size; ++rank) {
      if (!are_equal(sums[reference], sums[rank], tolerance, scale)) others.push_back(rank);
    }
    if (others.empty()) return {};
    if (reference == 0 || others.size() < fewest.size()) fewest = std::move(others);
  }
  return fewest;
}

DriftWatch::DriftWatch(Parameters parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                       std::int64_t interval)
    : parameters_(watched(parameters)), group_(std::move(group)), device_(at::kCPU) {
  if (parameters_.size() == 0) return;
  device_ = parameters_.tensors[0].device();
  waits_ = device_.is_cpu() && group_->getBackend(at::kCPU)->getBackendName() == "shm";
  windows_per_message_ = waits_ ? 1 : kWindowsPerMessage;
  every_ = interval * static_cast<std::int64_t>(windows_per_message_);
  make_windows();
  // The first backward may be one with other weights, and no step goes before it.
  sum_up();
}

void DriftWatch::make_windows() {
  std::int64_t total = 0;
  for (const auto& tensor : parameters_.tensors) total += tensor.numel();
  const std::int64_t share = (total + kWindows - 1) / kWindows;
  Window window;
  std::int64_t left = share;
  const auto close = [&] {
    chunks_ = std::max(chunks_, window.size());
    windows_.push_back(std::exchange(window, {}));
    left = share;
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_.tensors[i];
    const std::int64_t rows = rows_of(tensor);
    const std::int64_t row = tensor.numel() / rows;
    for (std::int64_t first = 0; first < rows;) {
      const std::int64_t taken = std::min(rows - first, (left + row - 1) / row);
      window.push_back({.parameter = i, .first = first, .rows = taken, .elements = taken * row});
      first += taken;
      left -= taken * row;
      if (left <= 0 || window.size() == kMostChunks) close();
    }
  }
  if (!window.empty()) close();
}

/// Calls `f(slot, chunk)` for what a message that begins with `window` carries.
template <class F>
void DriftWatch::for_each_chunk(std::size_t window, F&& f) {
  // A small model has fewer windows than a message.
  const auto count = std::min(windows_per_message_, windows_.size());
  for (std::size_t i = 0; i < count; ++i) {
    auto& chunks = windows_[(window + i) % windows_.size()];
    for (std::size_t j = 0; j < chunks.size(); ++j) f(1 + i * chunks_ + j, chunks[j]);
  }
}

at::Tensor DriftWatch::view_of(const Chunk& chunk) const {
  auto view = parameters_.tensors[chunk.parameter].detach();
  if (view.dim() > 0) {
    // A parameter may have been given other data.
    const auto first = std::min(chunk.first, view.size(0));
    view = view.narrow(0, first, std::min(chunk.rows, view.size(0) - first));
  }
  return view.is_complex() ? at::view_as_real(view) : view;
}

double DriftWatch::sum_of(const Chunk& chunk) const {
  const auto& tensor = parameters_.tensors[chunk.parameter];
  const std::int64_t row = chunk.elements / chunk.rows;
  // It may have been moved to a device, or been given another shape.
  const bool as_planned = tensor.is_cpu() && chunk.first + chunk.rows <= rows_of(tensor) &&
                          tensor.numel() == row * rows_of(tensor) && tensor.is_contiguous();
  const auto sum = [&]<class T>(const T* data, std::int64_t parts) {
    return sum_of_terms(data + chunk.first * row * parts, chunk.elements * parts);
  };
  if (as_planned) {
    const void* const data = tensor.const_data_ptr();
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return sum(static_cast<const float*>(data), 1);
      case at::kDouble:
        return sum(static_cast<const double*>(data), 1);
      case at::kBFloat16:
        return sum(static_cast<const at::BFloat16*>(data), 1);
      case at::kComplexFloat:
        return sum(static_cast<const float*>(data), 2);
      case at::kComplexDouble:
        return sum(static_cast<const double*>(data), 2);
      default:
        break;
    }
  }
  const auto view = view_of(chunk);
  if (view.numel() == 0) return 0;
  const auto dtype = sum_dtype(view);
  return at::linalg_vector_norm(view, 1, {}, false, dtype).item<double>() +
         kSlant * view.sum(dtype).item<double>();
}

void DriftWatch::sum_up() {
  if (paused_ || is_summed_ || windows_.empty() || !is_due(backwards_ + 1)) return;
  const at::NoGradGuard no_grad;
  if (device_.is_cpu()) {
    sum_up_on_host();
  } else {
    sum_up_on_device();
  }
  is_summed_ = true;
}

void DriftWatch::sum_up_on_host() {
  if (!own_.defined()) {
    const auto slots = 1 + static_cast<std::int64_t>(windows_per_message_ * chunks_);
    own_ = at::zeros({slots}, at::kDouble);
  }
  auto* const sums = own_.mutable_data_ptr<double>();
  std::fill(sums, sums + own_.numel(), 0);
  for_each_chunk(next_, [&](std::size_t slot, const Chunk& chunk) { sums[slot] = sum_of(chunk); });
}

void DriftWatch::sum_up_on_device() {
  // Without the slant: one kernel computes the norms of all tensors of a dtype, and none the sums.
  struct Norms {
    at::ScalarType dtype;
    std::vector<at::Tensor> views = {};
    std::vector<std::int64_t> slots = {};
  };
  std::vector<Norms> all;
  for_each_chunk(next_, [&](std::size_t slot, const Chunk& chunk) {
    const auto view = view_of(chunk);
    if (view.numel() == 0 || view.device() != device_) return;
    auto same = std::ranges::find(all, view.scalar_type(), &Norms::dtype);
    if (same == all.end()) same = all.insert(same, {.dtype = view.scalar_type()});
    same->views.push_back(view);
    same->slots.push_back(static_cast<std::int64_t>(slot));
  });
  const auto slots = 1 + static_cast<std::int64_t>(windows_per_message_ * chunks_);
  own_ = at::zeros({slots}, at::TensorOptions(at::kDouble).device(device_));
  for (const auto& [dtype, views, places] : all) {
    const auto norms = at::_foreach_norm(views, 1, sum_dtype(views[0]));
    const auto sums = at::stack(norms).to(own_.options());
    // Places of one dtype are mostly one after another: no index has to be sent to the device.
    for (std::size_t begin = 0; begin < places.size();) {
      std::size_t end = begin + 1;
      while (end < places.size() && places[end] == places[end - 1] + 1) ++end;
      const auto count = static_cast<std::int64_t>(end - begin);
      own_.narrow(0, places[begin], count)
          .copy_(sums.narrow(0, static_cast<std::int64_t>(begin), count));
      begin = end;
    }
  }
}

void DriftWatch::note_loss(const at::Tensor& loss) {
  if (paused_ || !is_due(backwards_ + 1)) return;
  loss_on_host_ = 0;
  loss_on_device_ = at::Tensor();
  if (loss.numel() != 1 || !loss.is_floating_point() || loss.device() != device_) return;
  if (device_.is_cpu()) {
    loss_on_host_ = loss.item<double>();
  } else {
    loss_on_device_ = loss.detach().reshape({});
  }
}

void DriftWatch::pause() noexcept {
  paused_ = true;
  is_summed_ = false;
}

void DriftWatch::resume() noexcept {
  paused_ = false;
  is_summed_ = false;
}

void DriftWatch::exchange() {
  if (paused_ || windows_.empty()) return;
  receive();
  sum_up();
  ++backwards_;
  if (!std::exchange(is_summed_, false)) return;
  if (device_.is_cpu()) {
    *own_.mutable_data_ptr<double>() = loss_on_host_;
  } else if (const auto loss = std::exchange(loss_on_device_, {}); loss.defined()) {
    own_.select(0, 0).copy_(loss);
  }
  send();
}

void DriftWatch::send() {
  Message message{.window = next_, .backward = backwards_};
  next_ = (next_ + windows_per_message_) % windows_.size();
  if (!all_.defined()) all_ = at::empty({group_->getSize() * own_.numel()}, own_.options());
  message.work = comm::start_all_gather(*group_, all_, own_, /*asynchronous=*/!waits_);
  if (waits_) {
    message.work->wait();
    message.all = all_;
    compare(message);
    return;
  }
  message.own = std::exchange(own_, {});
  message.all = std::exchange(all_, {});
  messages_.push_back(std::move(message));
}

void DriftWatch::receive() {
  while (!messages_.empty() && is_here(messages_.front())) {
    const auto message = std::move(messages_.front());
    messages_.pop_front();
    compare(message);
  }
}

/// On a device nothing is waited for: the device copies the result to the host when it is done.
bool DriftWatch::is_here(Message& message) {
  if (message.copied) return message.copied->query();
  message.work->wait();
  if (message.all.is_cpu()) return true;
  const auto options = message.all.options().device(at::kCPU).pinned_memory(true);
  auto on_host = at::empty(message.all.sizes(), options);
  on_host.copy_(message.all, /*non_blocking=*/true);
  message.copied.emplace(message.all.device().type());
  const c10::impl::VirtualGuardImpl driver(message.all.device().type());
  message.copied->record(driver.getStream(message.all.device()));
  message.all = std::move(on_host);
  return false;
}

void DriftWatch::compare(const Message& message) {
  const auto size = static_cast<std::size_t>(group_->getSize());
  const auto slots = static_cast<std::size_t>(message.all.numel()) / size;
  const auto* const all = message.all.const_data_ptr<double>();
  std::vector<double> sums(size);
  const auto of_ranks = [&](std::size_t slot) {
    for (std::size_t rank = 0; rank < size; ++rank) sums[rank] = all[rank * slots + slot];
  };
  for_each_chunk(message.window, [&](std::size_t slot, Chunk& chunk) {
    of_ranks(slot);
    const auto tolerance = tolerance_of(parameters_.tensors[chunk.parameter], chunk.elements);
    const auto ranks = ranks_that_differ(sums, tolerance, chunk.scale);
    if (!ranks.empty()) report(chunk, sums, ranks, message);
    for (const double sum : sums) {
      if (std::isfinite(sum)) chunk.scale = std::max(chunk.scale, sum);
    }
  });
  of_ranks(0);
  compare_losses(sums);
}

void DriftWatch::compare_losses(std::span<const double> losses) {
  const bool same = std::ranges::all_of(losses, [&](double one) { return one == losses[0]; });
  // A loss that stays the same tells nothing, nor does one that is not there.
  const bool tells = same && losses[0] != 0 && losses[0] != last_loss_ && !in_prepared_loader();
  last_loss_ = losses[0];
  same_losses_ = tells ? same_losses_ + 1 : 0;
  if (same_losses_ != kSameLosses) return;
  warn_once(str("backward: the loss was the same to the last bit on all ", losses.size(),
                " processes in ", kSameLosses,
                " comparisons in a row. If it is computed over gathered values, this is right; "
                "otherwise the processes train on the same batches, which takes as long as one "
                "process and learns no more: prepare the data loader, or give each process data of "
                "its own."));
}

void DriftWatch::report(const Chunk& chunk, std::span<const double> sums,
                        const std::vector<int>& ranks, const Message& message) const {
  const auto& tensor = parameters_.tensors[chunk.parameter];
  const bool whole = chunk.elements == tensor.numel();
  std::vector<std::string> values;
  for (const int rank : ranks) values.push_back(str(sums[static_cast<std::size_t>(rank)]));
  std::size_t reference = 0;
  while (std::ranges::find(ranks, static_cast<int>(reference)) != ranks.end()) ++reference;
  const auto text = detail::str(
      "backward: the parameter '", parameters_.names[chunk.parameter], "' of shape ",
      tensor.sizes(), " has drifted apart: ", rank_list(ranks),
      ranks.size() == 1 ? " has" : " have", " other values than rank ", reference,
      " (the sum over ",
      whole ? str("its elements")
            : str("its rows ", chunk.first, " to ", chunk.first + chunk.rows - 1),
      ", mostly of magnitudes, is ", join(values), " there and ", sums[reference], " on rank ",
      reference, "). It was seen in averaged backward ", message.backward,
      " of the model. Look for what changes parameters on some processes only: a step or a "
      "load_state_dict under a condition on the rank, values written by hand, gradients "
      "changed after backward. If processes shall have parameters of their own, set "
      "drift_check = 0 of AcceleratorOptions, or ACCELERATE_DRIFT_CHECK=0.");
  // A result that a device copies is read by each rank when it is there: the others may wait for
  // this rank before they come to read theirs.
  if (const auto tell = failure_hook.load(); tell != nullptr && message.copied) tell(text);
  throw CommError(text, ranks.front());
}

}  // namespace accelerate::detail::parallel
