#include "accelerate/own_data.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "accelerate/collectives.h"
#include "accelerate/errors.h"
#include "accelerate/name_collectives.h"
#include "accelerate/random.h"
#include "accelerate/samplers.h"
#include "core/text.h"

namespace accelerate::detail {

Agreement agree_on_supply(Supply mine) {
  const auto named = name_collectives("DataLoaderShard");
  const auto all =
      accelerate::gather(at::full({1}, static_cast<int>(mine), at::kByte)).to(at::kLong);
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
          .nothing = none == all.numel()};
}

bool equally_many(const std::optional<std::int64_t>& batches) {
  const auto named = name_collectives("DataLoaderShard");
  const auto all = accelerate::gather(at::full({1}, batches.value_or(-1), at::kLong));
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
