// accelerate/detail/data/sampler_adaptors.h - what stands between a sampler of other making and
// ours.
//
// Internal to accelerate/data/sampler_adaptors.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/data/batch_samplers.h"
#include "accelerate/errors.h"
#include "accelerate/samplers.h"

namespace accelerate::detail::data {

inline void check_sampler(const void* sampler) {
  if (sampler) return;
  throw ArgumentError("The sampler is a null pointer. Pass one, or leave the argument out.");
}

/// A sampler that holds its position itself can be walked by one pass at a time: a newer pass puts
/// an end to the older one.
template <class S>
struct SharedByPasses {
  std::shared_ptr<S> sampler;
  std::int64_t begun = 0;
};

/// One pass over such a sampler.
template <class S>
class ExclusivePass {
 public:
  ExclusivePass(std::shared_ptr<SharedByPasses<S>> shared, std::int64_t epoch)
      : shared_(std::move(shared)), epoch_(epoch) {
    restart();
  }
  void restart() {
    pass_ = ++shared_->begun;
    S& sampler = *shared_->sampler;
    if constexpr (requires { sampler.set_epoch(epoch_); }) sampler.set_epoch(epoch_);
    if constexpr (requires { sampler.begin(epoch_); }) {
      sampler.begin(epoch_);
    } else {
      sampler.reset(std::nullopt);
    }
  }
  S& sampler() {
    if (pass_ != shared_->begun) {
      throw StateError(
          "Another pass over this sampler has begun. The sampler holds its position itself, so "
          "only the newest pass can go on: give each data loader that is iterated at the same time "
          "a sampler of its own.");
    }
    return *shared_->sampler;
  }

 private:
  std::shared_ptr<SharedByPasses<S>> shared_;
  std::int64_t epoch_;
  std::int64_t pass_ = 0;
};

/// LibTorch's samplers draw from the default generator when they are reset. The order of a pass can
/// be repeated from its state, without touching the numbers that others draw.
class ACCELERATE_API DefaultGeneratorAt {
 public:
  explicit DefaultGeneratorAt(const at::Tensor& state);
  ~DefaultGeneratorAt();
  DefaultGeneratorAt(const DefaultGeneratorAt&) = delete;
  DefaultGeneratorAt& operator=(const DefaultGeneratorAt&) = delete;

  [[nodiscard]] static at::Tensor state_now();

 private:
  at::Tensor before_;
};

template <class S>
class UserIndexStream final : public IndexStream {
 public:
  UserIndexStream(std::shared_ptr<SharedByPasses<S>> shared, std::int64_t epoch,
                  const at::Tensor& /*generator_state*/)
      : pass_(std::move(shared), epoch) {}

  std::size_t take(std::span<std::int64_t> out) override {
    S& sampler = pass_.sampler();
    std::size_t taken = 0;
    for (; taken < out.size(); ++taken) {
      const auto index = sampler.next();
      if (!index) break;
      out[taken] = static_cast<std::int64_t>(*index);
    }
    return taken;
  }
  void rewind() override { pass_.restart(); }

 private:
  ExclusivePass<S> pass_;
};

template <class S>
class TorchIndexStream final : public IndexStream {
 public:
  TorchIndexStream(std::shared_ptr<SharedByPasses<S>> shared, std::int64_t epoch,
                   const at::Tensor& state)
      : state_(state.defined() ? state : DefaultGeneratorAt::state_now()),
        pass_(begin(std::move(shared), epoch, state)) {}

  std::size_t take(std::span<std::int64_t> out) override {
    S& sampler = pass_.sampler();
    std::size_t taken = 0;
    while (taken < out.size()) {
      const auto some = sampler.next(out.size() - taken);
      if (!some || some->empty()) break;
      for (const std::size_t index : *some) out[taken++] = static_cast<std::int64_t>(index);
    }
    return taken;
  }
  void rewind() override {
    const DefaultGeneratorAt scope(state_);
    pass_.restart();
  }
  [[nodiscard]] at::Tensor generator_state() const override { return state_; }

 private:
  static ExclusivePass<S> begin(std::shared_ptr<SharedByPasses<S>> shared, std::int64_t epoch,
                                const at::Tensor& state) {
    if (!state.defined()) return ExclusivePass<S>(std::move(shared), epoch);
    const DefaultGeneratorAt scope(state);
    return ExclusivePass<S>(std::move(shared), epoch);
  }

  at::Tensor state_;
  ExclusivePass<S> pass_;
};

/// The size of whatever says it as a number or an optional one.
template <class S>
std::optional<std::int64_t> size_of(S& sampler) {
  std::optional<std::int64_t> size;
  if constexpr (requires { std::optional<std::int64_t>(sampler.size()); }) size = sampler.size();
  return size;
}

/// `Stream` is what walks an `S`.
template <class S, class Stream = UserIndexStream<S>>
class AdaptedSampler final : public Sampler {
 public:
  explicit AdaptedSampler(std::shared_ptr<S> sampler)
      : shared_(std::make_shared<SharedByPasses<S>>(std::move(sampler))) {}

  std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                     const at::Tensor& generator_state) override {
    return std::make_unique<Stream>(shared_, epoch, generator_state);
  }
  std::optional<std::int64_t> size() const override { return size_of(*shared_->sampler); }

 private:
  std::shared_ptr<SharedByPasses<S>> shared_;
};

template <class S>
using AdaptedTorchSampler = AdaptedSampler<S, TorchIndexStream<S>>;

template <class S>
class UserBatchStream final : public BatchIndexStream {
 public:
  UserBatchStream(std::shared_ptr<SharedByPasses<S>> shared, std::int64_t epoch)
      : pass_(std::move(shared), epoch) {}

  std::optional<IndexBatch> next() override {
    auto batch = pass_.sampler().next();
    if (!batch) return std::nullopt;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(*batch)>, IndexBatch>) {
      return std::move(*batch);
    } else {
      return IndexBatch(std::ranges::begin(*batch), std::ranges::end(*batch));
    }
  }
  void seek(std::int64_t /*samples*/, std::int64_t batches) override {
    pass_.restart();
    skip(batches);
  }

 private:
  ExclusivePass<S> pass_;
};

template <class S>
class AdaptedBatchSampler final : public BatchIndexSampler {
 public:
  explicit AdaptedBatchSampler(std::shared_ptr<S> sampler)
      : shared_(std::make_shared<SharedByPasses<S>>(std::move(sampler))) {}

  std::unique_ptr<BatchIndexStream> begin(std::int64_t epoch, const at::Tensor&) override {
    return std::make_unique<UserBatchStream<S>>(shared_, epoch);
  }
  std::optional<std::int64_t> size() const override { return size_of(*shared_->sampler); }
  std::optional<std::int64_t> batch_size() const override {
    S& sampler = *shared_->sampler;
    if constexpr (requires { sampler.batch_size(); }) return sampler.batch_size();
    return std::nullopt;
  }
  bool drop_last() const override {
    S& sampler = *shared_->sampler;
    if constexpr (requires { sampler.drop_last(); }) return sampler.drop_last();
    return false;
  }
  std::shared_ptr<Sampler> sampler() const override {
    S& sampler = *shared_->sampler;
    if constexpr (requires { std::shared_ptr<Sampler>(sampler.sampler()); }) {
      return sampler.sampler();
    }
    return nullptr;
  }

 private:
  std::shared_ptr<SharedByPasses<S>> shared_;
};

}  // namespace accelerate::detail::data
