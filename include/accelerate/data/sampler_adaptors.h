// accelerate/data/sampler_adaptors.h - samplers and batch samplers of other making.
//
//     std::shared_ptr<Sampler> order = as_sampler(torch::data::samplers::RandomSampler(1000));
//     std::shared_ptr<Sampler> some = as_sampler(std::vector{4, 2, 7});
//     std::shared_ptr<BatchIndexSampler> buckets = as_batch_sampler(MyBuckets{});
//
// `make_data_loader` calls these for you.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/data/batch_samplers.h"
#include "accelerate/detail/data/sampler_adaptors.h"
#include "accelerate/samplers.h"

namespace accelerate {

/// A sampler of your own: `begin(epoch)` starts a pass, `next()` returns a `std::optional` index.
/// Where it has `size()` the length of a pass is known, and `set_epoch(epoch)` is called first.
template <class S>
concept UserSampler = requires(S& sampler) {
  sampler.begin(std::int64_t{});
  { *sampler.next() } -> std::convertible_to<std::int64_t>;
};

/// A sampler of LibTorch's kind: `reset(size)`, `next(count)`.
template <class S>
concept TorchSampler = requires(S& sampler) {
  sampler.reset(std::optional<std::size_t>{});
  { sampler.next(std::size_t{}) } -> std::same_as<std::optional<std::vector<std::size_t>>>;
};

/// Indices one by one.
template <class S>
concept IndexRange =
    std::ranges::forward_range<const S> && std::integral<std::ranges::range_value_t<const S>>;

/// A batch sampler of your own: `begin(epoch)`, and `next()` that returns a `std::optional` range
/// of indices. `size()`, `batch_size()`, `drop_last()`, `set_epoch(epoch)` and `sampler()` are used
/// where they are there.
template <class S>
concept UserBatchSampler = requires(S& sampler) {
  sampler.begin(std::int64_t{});
  requires std::integral<std::ranges::range_value_t<decltype(*sampler.next())>>;
};

/// Whether `as_sampler` takes it.
template <class S>
concept SamplerLike =
    std::derived_from<S, Sampler> || UserSampler<S> || TorchSampler<S> || IndexRange<S>;

/// Whether `as_batch_sampler` takes it.
template <class S>
concept BatchSamplerLike = std::derived_from<S, BatchIndexSampler> || UserBatchSampler<S>;

/// A sampler of ours, of LibTorch's or of your own, or a list of indices, as a `Sampler`. Throws
/// `ArgumentError` for a null pointer, as does `as_batch_sampler`.
template <class S>
  requires SamplerLike<S>
[[nodiscard]] std::shared_ptr<Sampler> as_sampler(std::shared_ptr<S> sampler) {
  detail::data::check_sampler(sampler.get());
  if constexpr (std::derived_from<S, Sampler>) {
    return sampler;
  } else if constexpr (TorchSampler<S>) {
    return std::make_shared<detail::data::AdaptedTorchSampler<S>>(std::move(sampler));
  } else if constexpr (UserSampler<S>) {
    return std::make_shared<detail::data::AdaptedSampler<S>>(std::move(sampler));
  } else {
    return std::make_shared<ListSampler>(
        std::vector<std::int64_t>(std::ranges::begin(*sampler), std::ranges::end(*sampler)));
  }
}
template <class S>
  requires SamplerLike<std::remove_cvref_t<S>>
[[nodiscard]] std::shared_ptr<Sampler> as_sampler(S&& sampler) {
  return as_sampler(std::make_shared<std::remove_cvref_t<S>>(std::forward<S>(sampler)));
}

/// A batch sampler of ours or of your own as a `BatchIndexSampler`.
template <class S>
  requires BatchSamplerLike<S>
[[nodiscard]] std::shared_ptr<BatchIndexSampler> as_batch_sampler(std::shared_ptr<S> sampler) {
  detail::data::check_sampler(sampler.get());
  if constexpr (std::derived_from<S, BatchIndexSampler>) {
    return sampler;
  } else {
    return std::make_shared<detail::data::AdaptedBatchSampler<S>>(std::move(sampler));
  }
}
template <class S>
  requires BatchSamplerLike<std::remove_cvref_t<S>>
[[nodiscard]] std::shared_ptr<BatchIndexSampler> as_batch_sampler(S&& sampler) {
  return as_batch_sampler(std::make_shared<std::remove_cvref_t<S>>(std::forward<S>(sampler)));
}

}  // namespace accelerate
