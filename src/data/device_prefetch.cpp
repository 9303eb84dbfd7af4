#include <c10/core/Event.h>

#include <exception>
#include <optional>
#include <utility>

#include "data/copy_stream.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

/// Moves each batch when it is asked for.
class MovingPass final : public Pass {
 public:
  MovingPass(std::unique_ptr<Pass> pass, const BatchType& type, at::Device device,
             bool non_blocking)
      : pass_(std::move(pass)), type_(type), device_(device), non_blocking_(non_blocking) {}

  std::optional<LoadedBatch> next() override {
    auto loaded = pass_->next();
    if (loaded) type_.send(loaded->batch, device_, non_blocking_);
    return loaded;
  }

 private:
  std::unique_ptr<Pass> pass_;
  const BatchType& type_;
  at::Device device_;
  bool non_blocking_;
};

/// Starts to copy a batch when the one before it is handed out, so that the copy runs beside the
/// computation. An exception while reading ahead is thrown when the turn of its batch comes.
class PrefetchPass final : public Pass {
 public:
  PrefetchPass(std::unique_ptr<Pass> pass, const BatchType& type, at::Device device)
      : pass_(std::move(pass)), type_(type), device_(device), stream_(CopyStream::to(device)) {}

  std::optional<LoadedBatch> next() override {
    auto now = ahead_ ? std::move(*ahead_) : begin_copy();
    ahead_.reset();
    if (now.failure) std::rethrow_exception(std::move(now.failure));
    if (!now.loaded) return std::nullopt;
    if (!now.loaded->facts.last) ahead_ = begin_copy();

    auto& batch = now.loaded->batch;
    stream_.take_over(*now.copied, type_.leaves(batch));
    // What the stream did not copy: sparse tensors, objects that move themselves.
    type_.send(batch, device_, /*non_blocking=*/true);
    return std::move(now.loaded);
  }

 private:
  struct Copy {
    std::optional<LoadedBatch> loaded = std::nullopt;
    std::optional<c10::Event> copied = std::nullopt;
    std::exception_ptr failure = nullptr;
  };

  Copy begin_copy() {
    Copy copy;
    try {
      copy.loaded = pass_->next();
      if (!copy.loaded) return copy;
      auto& batch = copy.loaded->batch;
      type_.set_leaves(batch, stream_.copy(type_.leaves(batch)));
      copy.copied = stream_.mark();
    } catch (...) {
      copy.failure = std::current_exception();
    }
    return copy;
  }

  std::unique_ptr<Pass> pass_;
  const BatchType& type_;
  at::Device device_;
  const CopyStream& stream_;
  std::optional<Copy> ahead_ = std::nullopt;
};

}  // namespace

std::unique_ptr<Pass> device_prefetch(std::unique_ptr<Pass> pass, const BatchType& type,
                                      at::Device device, bool non_blocking) {
  if (type.holds_tensors && CopyStream::leads_to(device)) {
    return std::make_unique<PrefetchPass>(std::move(pass), type, device);
  }
  if (type.send == nullptr) return pass;
  return std::make_unique<MovingPass>(std::move(pass), type, device, non_blocking);
}

}  // namespace accelerate::detail::data
