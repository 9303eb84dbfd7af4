#include <ATen/Functions.h>

#include <exception>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/collectives.h"
#include "accelerate/state/partial_state.h"
#include "core/text.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

/// What a process says of the batch it is about to hand out.
enum class Supply : std::uint8_t {
  kMore,    ///< others follow
  kLast,    ///< the last one of its data
  kRepeat,  ///< its data are over, this one was handed out before
  kNone,    ///< it never had one
  kFailure  ///< it cannot be loaded
};

/// What follows from what all of them say.
struct Agreement {
  bool over = false;      ///< nothing new follows on any process
  bool repeated = false;  ///< some process repeats what it handed out before
  bool nothing = false;   ///< no process has any data
  /// Null where all hold equally many genuine samples, and where a process does not know how many.
  std::shared_ptr<const UnevenParts> parts = nullptr;
};

std::shared_ptr<const UnevenParts> parts_of(const at::Tensor& supplies, const at::Tensor& lengths) {
  const auto repeats = supplies.eq(static_cast<int>(Supply::kRepeat));
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

/// Collective. `length` is how many samples the batch has, -1 if not known.
Agreement agree_on_supply(Supply mine, std::int64_t length) {
  const auto named = name_collectives("DataLoaderShard");
  const auto told = gather_numbers({static_cast<std::int64_t>(mine), length});
  const auto all = told.select(1, 0);
  const auto count = [&](Supply supply) {
    return all.eq(static_cast<int>(supply)).sum().item<std::int64_t>();
  };
  const auto first = [&](Supply supply) {
    return all.eq(static_cast<int>(supply)).to(at::kByte).argmax().item<std::int64_t>();
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

class PreshardedPass final : public Pass {
 public:
  PreshardedPass(std::unique_ptr<Pass> pass, const BatchType& type,
                 std::function<std::unique_ptr<Pass>()> reopen, bool began_before)
      : pass_(std::move(pass)), type_(type), reopen_(std::move(reopen)), had_some_(began_before) {}

  std::optional<LoadedBatch> next() override {
    if (!reopen_) return all_genuine(pass_->next());
    if (over_) return std::nullopt;
    over_ = true;  // if it throws
    Supply supply = Supply::kFailure;
    std::optional<LoadedBatch> loaded;
    std::exception_ptr failure;
    try {
      loaded = load(supply);
    } catch (...) {
      failure = std::current_exception();
    }
    auto agreement = agree_on_supply(supply, loaded ? length(loaded->batch) : -1);
    if (failure) std::rethrow_exception(failure);
    if (agreement.nothing) return std::nullopt;
    over_ = agreement.over;
    loaded->facts.last = agreement.over;
    loaded->facts.remainder = agreement.over && !agreement.repeated ? 0 : -1;
    loaded->facts.padded_size = -1;
    loaded->parts = std::move(agreement.parts);
    return loaded;
  }

 private:
  static std::optional<LoadedBatch> all_genuine(std::optional<LoadedBatch> loaded) {
    if (loaded && loaded->facts.last) {
      loaded->facts.remainder = 0;
      loaded->facts.padded_size = -1;
    }
    return loaded;
  }

  /// Samples of a batch, -1 if not known.
  [[nodiscard]] std::int64_t length(const AnyBatch& batch) const {
    return type_.list_size != nullptr ? type_.list_size(batch) : known_batch_size(type_, batch);
  }

  std::optional<LoadedBatch> load(Supply& supply) {
    auto loaded = spent_ ? std::nullopt : pass_->next();
    if (loaded) {
      had_some_ = true;
      spent_ = loaded->facts.last;
      supply = spent_ ? Supply::kLast : Supply::kMore;
      newest_ = loaded->facts;
      sequence_ = loaded->sequence;
      return loaded;
    }
    spent_ = true;
    supply = had_some_ ? Supply::kRepeat : Supply::kNone;
    if (!had_some_) return std::nullopt;
    if (!repeats_) repeats_ = reopen_();
    loaded = repeats_->next();
    if (!loaded) {
      repeats_ = reopen_();
      loaded = repeats_->next();
    }
    // Repeats do not move the position.
    loaded->sequence = ++sequence_;
    loaded->facts = newest_;
    return loaded;
  }

  std::unique_ptr<Pass> pass_;
  const BatchType& type_;
  std::function<std::unique_ptr<Pass>()> reopen_;
  bool had_some_;
  bool spent_ = false;
  bool over_ = false;
  std::unique_ptr<Pass> repeats_ = nullptr;
  std::int64_t sequence_ = -1;
  BatchFacts newest_ = {};  // of the last batch that is no repeat
};

}  // namespace

at::Tensor gather_numbers(const std::vector<std::int64_t>& mine, std::source_location where) {
  const PartialState state;  // NCCL sends from the device only
  const auto row = at::tensor(mine, at::kLong).unsqueeze(0);
  return accelerate::gather(row.to(state.device()), where).cpu();
}

bool equally_many(const std::optional<std::int64_t>& batches,
                  const std::optional<std::int64_t>& samples) {
  const auto named = name_collectives("DataLoaderShard");
  const auto all = gather_numbers({batches.value_or(-1), samples.value_or(-1)});
  return all.min().item<std::int64_t>() >= 0 && all.eq(all[0]).all().item<bool>();
}

std::unique_ptr<Pass> presharded_pass(std::unique_ptr<Pass> pass, const BatchType& type,
                                      std::function<std::unique_ptr<Pass>()> reopen,
                                      bool began_before) {
  return std::make_unique<PreshardedPass>(std::move(pass), type, std::move(reopen), began_before);
}

std::int64_t known_batch_size(const BatchType& type, const AnyBatch& batch) {
  try {
    return type.batch_size(batch);
  } catch (const ArgumentError&) {
    return -1;
  }
}

}  // namespace accelerate::detail::data
