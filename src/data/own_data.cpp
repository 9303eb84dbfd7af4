#include "accelerate/own_data.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

#include "accelerate/collectives.h"
#include "accelerate/errors.h"
#include "accelerate/name_collectives.h"
#include "accelerate/partial_state.h"
#include "accelerate/random.h"
#include "accelerate/samplers.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

std::shared_ptr<const UnevenParts> parts_of(const at::Tensor& supplies, const at::Tensor& lengths) {
  const auto repeats = supplies == static_cast<int>(Supply::kRepeat);
  if (lengths.min().item<std::int64_t>() < 0) return nullptr;
  if (lengths.eq(lengths[0]).all().item<bool>() && !repeats.any().item<bool>()) return nullptr;
  const auto listed = [](const at::Tensor& numbers) {
    const auto* first = numbers.const_data_ptr<std::int64_t>();
    return std::vector<std::int64_t>(first, first + numbers.numel());
  };
  UnevenParts parts;
  parts.lengths = listed(lengths.contiguous());
  parts.genuine = listed(lengths.masked_fill(repeats, 0));
  return std::make_shared<const UnevenParts>(std::move(parts));
}

}  // namespace

at::Tensor gather_numbers(const std::vector<std::int64_t>& mine, std::source_location where) {
  const PartialState state;  // NCCL sends from the device only
  const auto row = at::tensor(mine, at::kLong).unsqueeze(0);
  return accelerate::gather(row.to(state.device()), where).cpu();
}

Agreement agree_on_supply(Supply mine, std::int64_t length) {
  const auto named = name_collectives("DataLoaderShard");
  const auto told = gather_numbers({static_cast<std::int64_t>(mine), length});
  const auto all = told.select(1, 0);
  const auto count = [&](Supply supply) {
    return (all == static_cast<int>(supply)).sum().item<std::int64_t>();
  };
  const auto first = [&](Supply supply) {
    return (all == static_cast<int>(supply)).to(at::kByte).argmax().item<std::int64_t>();
  };
  if (count(Supply::kFailure) > 0 && mine != Supply::kFailure) {
    const auto rank = static_cast<int>(first(Supply::kFailure));
    throw CommError(str("Rank ", rank, " could not load its batch; its own message says why."),
                    rank);
  }
  const auto none = count(Supply::kNone);
  if (none > 0 && none < all.numel() && count(Supply::kFailure) == 0) {
    throw ArgumentError(str("Rank ", first(Supply::kNone),
                            " has no data while other ranks have some, so that they cannot see ",
                            "equally many batches. Give each rank a part of the data, or set ",
                            "`even_batches` to false."));
  }
  return {.over = count(Supply::kMore) == 0,
          .repeated = count(Supply::kRepeat) > 0,
          .nothing = none == all.numel(),
          .parts = parts_of(all, told.select(1, 1))};
}

bool equally_many(const std::optional<std::int64_t>& batches,
                  const std::optional<std::int64_t>& samples) {
  const auto named = name_collectives("DataLoaderShard");
  const auto all = gather_numbers({batches.value_or(-1), samples.value_or(-1)});
  return all.min().item<std::int64_t>() >= 0 && all.eq(all[0]).all().item<bool>();
}

KeptGenerator::KeptGenerator(const BatchIndexSampler* batch_sampler) {
  const auto sampler = batch_sampler == nullptr ? nullptr : batch_sampler->sampler();
  if (!sampler) return;
  generator_ = sampler->generator();
  if (generator_) state_ = get_rng_state(RNGType::kGenerator, generator_);
}

KeptGenerator::~KeptGenerator() {
  if (generator_) set_rng_state(RNGType::kGenerator, state_, generator_);
}

}  // namespace accelerate::detail
