// accelerate/own_data.h - processes that each walk data of their own agree on the end.
//
// Internal to accelerate/prepared_loader.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <source_location>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/batch_samplers.h"
#include "accelerate/gather_for_metrics.h"
#include "accelerate/load_pipeline.h"
#include "accelerate/tensor_operations.h"

namespace accelerate::detail {

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
  /// Null where all hold equally many samples that are no repeats, and where somebody does not know
  /// how many.
  std::shared_ptr<const UnevenParts> parts = nullptr;
};

/// Collective. The numbers of all processes, as many each: [processes, numbers] on the CPU.
[[nodiscard]] ACCELERATE_API at::Tensor gather_numbers(
    const std::vector<std::int64_t>& mine,
    std::source_location where = std::source_location::current());
/// Collective. `length` is how many samples the batch has, -1 if not known. Throws `CommError` that
/// names the rank where loading failed on another process, and `ArgumentError` where some processes
/// have data and others have none.
[[nodiscard]] ACCELERATE_API Agreement agree_on_supply(Supply mine, std::int64_t length);
/// Collective. Whether all processes know how many batches and samples they have, and have equally
/// many.
[[nodiscard]] ACCELERATE_API bool equally_many(const std::optional<std::int64_t>& batches,
                                               const std::optional<std::int64_t>& samples);

/// Samples of a batch, -1 if it does not say.
template <class Batch>
std::int64_t batch_length(const Batch& batch) {
  if constexpr (tree::detail::kIs<Batch, std::vector> && !TensorTree<Batch>) {
    return std::ssize(batch);
  } else {
    return ignorant_find_batch_size(batch).value_or(-1);
  }
}

/// Puts the generator of a sampler, if it has one, back to where it was.
class ACCELERATE_API KeptGenerator {
 public:
  /// `batch_sampler` may be null.
  explicit KeptGenerator(const BatchIndexSampler* batch_sampler);
  ~KeptGenerator();
  KeptGenerator(const KeptGenerator&) = delete;
  KeptGenerator& operator=(const KeptGenerator&) = delete;

 private:
  std::optional<at::Generator> generator_ = std::nullopt;
  at::Tensor state_ = {};
};

/// The batches of a process that has data of its own: all of them are genuine. With `again`, which
/// begins the data anew, the processes tell each other with every batch whether others follow, and
/// who is done early repeats batches until all are.
template <class Batch>
class OwnDataPass final : public Pass<Batch> {
 public:
  using Again = std::function<std::unique_ptr<Pass<Batch>>()>;

  OwnDataPass(std::unique_ptr<Pass<Batch>> pass, Again again, bool began_before)
      : pass_(std::move(pass)), again_(std::move(again)), had_some_(began_before) {}

  std::optional<LoadedBatch<Batch>> next() override {
    if (!again_) return all_genuine(pass_->next());
    if (over_) return std::nullopt;
    over_ = true;  // if it throws
    Supply supply = Supply::kFailure;
    std::optional<LoadedBatch<Batch>> loaded;
    std::exception_ptr failure;
    try {
      loaded = load(supply);
    } catch (...) {
      failure = std::current_exception();
    }
    auto agreement = agree_on_supply(supply, loaded ? batch_length(loaded->batch) : -1);
    if (failure) std::rethrow_exception(failure);
    if (agreement.nothing) return std::nullopt;
    over_ = agreement.over;
    loaded->last = agreement.over;
    loaded->remainder = agreement.over && !agreement.repeated ? 0 : -1;
    loaded->padded_size = -1;
    loaded->parts = std::move(agreement.parts);
    return loaded;
  }

 private:
  static std::optional<LoadedBatch<Batch>> all_genuine(std::optional<LoadedBatch<Batch>> loaded) {
    if (loaded && loaded->last) {
      loaded->remainder = 0;
      loaded->padded_size = -1;
    }
    return loaded;
  }

  std::optional<LoadedBatch<Batch>> load(Supply& supply) {
    auto loaded = spent_ ? std::nullopt : pass_->next();
    if (loaded) {
      had_some_ = true;
      spent_ = loaded->last;
      supply = spent_ ? Supply::kLast : Supply::kMore;
      samples_after_ = loaded->samples_after;
      batches_after_ = loaded->batches_after;
      dataset_state_ = loaded->dataset_state;
      sequence_ = loaded->sequence;
      return loaded;
    }
    spent_ = true;
    supply = had_some_ ? Supply::kRepeat : Supply::kNone;
    if (!had_some_) return std::nullopt;
    if (!repeats_) repeats_ = again_();
    loaded = repeats_->next();
    if (!loaded) {
      repeats_ = again_();
      loaded = repeats_->next();
    }
    loaded->sequence = ++sequence_;
    loaded->samples_after = samples_after_;
    loaded->batches_after = batches_after_;
    loaded->dataset_state = dataset_state_;
    return loaded;
  }

  std::unique_ptr<Pass<Batch>> pass_;
  Again again_;
  bool had_some_;
  bool spent_ = false;
  bool over_ = false;
  std::unique_ptr<Pass<Batch>> repeats_ = nullptr;
  std::int64_t sequence_ = -1;
  std::int64_t samples_after_ = 0;
  std::int64_t batches_after_ = 0;
  std::optional<Value> dataset_state_ = std::nullopt;
};

}  // namespace accelerate::detail
