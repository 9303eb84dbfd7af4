#include "accelerate/data/batch_samplers.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/samplers.h"
#include "core/text.h"
#include "data/batch_plan.h"

namespace accelerate {
namespace {

using detail::str;

class BatchSamplerStream final : public BatchIndexStream {
 public:
  BatchSamplerStream(std::unique_ptr<IndexStream> indices, std::int64_t batch_size, bool drop_last)
      : indices_(std::move(indices)), batch_size_(batch_size), drop_last_(drop_last) {}

  std::optional<IndexBatch> next() override {
    IndexBatch batch;
    bool full = false;
    while (!full && take_more(batch)) full = std::ssize(batch) == batch_size_;
    if (batch.empty() || (drop_last_ && !full)) return std::nullopt;
    return batch;
  }

  SkippedBatches skip(std::int64_t batches) override {
    if (batches <= 0) return {};
    const bool beyond_all = batches > std::numeric_limits<std::int64_t>::max() / batch_size_;
    const auto passed = indices_->skip(beyond_all ? std::numeric_limits<std::int64_t>::max()
                                                  : batches * batch_size_);
    const auto full = passed / batch_size_;
    if (drop_last_ || passed % batch_size_ == 0) return {full, full * batch_size_};
    return {full + 1, passed};
  }

  void seek(std::int64_t samples, std::int64_t /*batches*/) override {
    indices_->rewind();
    indices_->skip(samples);
  }

  [[nodiscard]] at::Tensor generator_state() const override { return indices_->generator_state(); }

 private:
  // A whole number of the blocks in which samplers draw.
  static constexpr std::int64_t kTakenAtOnce = 1 << 14;

  /// Memory follows the data: a batch size may be far above their number. False when they end.
  bool take_more(IndexBatch& batch) {
    const auto taken = std::ssize(batch);
    const auto wanted = std::min(batch_size_ - taken, std::max(taken, kTakenAtOnce));
    batch.resize(static_cast<std::size_t>(taken + wanted));
    const auto came = indices_->take(std::span(batch).subspan(static_cast<std::size_t>(taken)));
    batch.resize(static_cast<std::size_t>(taken) + came);
    return static_cast<std::int64_t>(came) == wanted;
  }

  std::unique_ptr<IndexStream> indices_;
  std::int64_t batch_size_;
  bool drop_last_;
};

class ShardStream final : public BatchIndexStream {
 public:
  ShardStream(std::shared_ptr<BatchIndexSampler> batch_sampler,
              const detail::data::PlanOptions& options, std::int64_t epoch,
              const at::Tensor& generator_state)
      : batch_sampler_(std::move(batch_sampler)),
        options_(options),
        epoch_(epoch),
        plan_(batch_sampler_, options_, epoch_, {.generator_state = generator_state}) {}

  std::optional<IndexBatch> next() override {
    auto planned = plan_.next();
    if (!planned) return std::nullopt;
    return std::move(planned->indices);
  }

  void seek(std::int64_t /*samples*/, std::int64_t batches) override {
    plan_ = detail::data::BatchPlan(batch_sampler_, options_, epoch_,
                                    {.generator_state = plan_.generator_state()});
    plan_.skip(batches);
  }

  [[nodiscard]] at::Tensor generator_state() const override { return plan_.generator_state(); }

 private:
  std::shared_ptr<BatchIndexSampler> batch_sampler_;
  detail::data::PlanOptions options_;
  std::int64_t epoch_;
  detail::data::BatchPlan plan_;
};

class SkippingStream final : public BatchIndexStream {
 public:
  SkippingStream(std::unique_ptr<BatchIndexStream> batches, std::int64_t skipped)
      : batches_(std::move(batches)), skipped_(batches_->skip(skipped)) {}

  std::optional<IndexBatch> next() override { return batches_->next(); }
  SkippedBatches skip(std::int64_t batches) override { return batches_->skip(batches); }
  void seek(std::int64_t samples, std::int64_t batches) override {
    batches_->seek(skipped_.samples + samples, skipped_.batches + batches);
  }
  [[nodiscard]] at::Tensor generator_state() const override { return batches_->generator_state(); }

 private:
  std::unique_ptr<BatchIndexStream> batches_;
  SkippedBatches skipped_;
};

detail::data::PlanOptions plan_options(const BatchSamplerShardOptions& options) {
  return {.num_processes = options.num_processes,
          .process_index = options.process_index,
          .split_batches = options.split_batches,
          .even_batches = options.even_batches};
}

}  // namespace

BatchIndexStream::~BatchIndexStream() = default;

SkippedBatches BatchIndexStream::skip(std::int64_t batches) {
  SkippedBatches skipped;
  while (skipped.batches < batches) {
    const auto batch = next();
    if (!batch) break;
    ++skipped.batches;
    skipped.samples += std::ssize(*batch);
  }
  return skipped;
}

at::Tensor BatchIndexStream::generator_state() const { return {}; }

BatchIndexSampler::~BatchIndexSampler() = default;

std::shared_ptr<Sampler> BatchIndexSampler::sampler() const { return nullptr; }

std::shared_ptr<BatchIndexSampler> BatchIndexSampler::with_sampler(
    std::shared_ptr<Sampler> /*sampler*/) const {
  return nullptr;
}

BatchSampler::BatchSampler(std::shared_ptr<Sampler> sampler, std::int64_t batch_size,
                           bool drop_last)
    : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last) {
  if (!sampler_) throw ArgumentError("BatchSampler needs a sampler to take indices from.");
  if (batch_size < 1) {
    throw ArgumentError(
        str("batch_size should be a positive integer value, but got batch_size=", batch_size, "."));
  }
  detail::data::check_batch_size_is_possible(batch_size);
}

std::unique_ptr<BatchIndexStream> BatchSampler::begin(std::int64_t epoch,
                                                      const at::Tensor& generator_state) {
  return std::make_unique<BatchSamplerStream>(sampler_->begin(epoch, generator_state), batch_size_,
                                              drop_last_);
}

std::optional<std::int64_t> BatchSampler::size() const {
  const auto samples = sampler_->size();
  if (!samples) return std::nullopt;
  return (*samples + (drop_last_ ? 0 : batch_size_ - 1)) / batch_size_;
}

std::shared_ptr<BatchIndexSampler> BatchSampler::with_sampler(
    std::shared_ptr<Sampler> sampler) const {
  return std::make_shared<BatchSampler>(std::move(sampler), batch_size_, drop_last_);
}

BatchSamplerShard::BatchSamplerShard(std::shared_ptr<BatchIndexSampler> batch_sampler,
                                     const BatchSamplerShardOptions& options)
    : batch_sampler_(std::move(batch_sampler)), options_(options) {
  if (!batch_sampler_) throw ArgumentError("BatchSamplerShard needs a batch sampler to share out.");
  validate(plan_options(options_), *batch_sampler_);
}

std::unique_ptr<BatchIndexStream> BatchSamplerShard::begin(std::int64_t epoch,
                                                           const at::Tensor& generator_state) {
  return std::make_unique<ShardStream>(batch_sampler_, plan_options(options_), epoch,
                                       generator_state);
}

std::optional<std::int64_t> BatchSamplerShard::size() const {
  return detail::data::planned_size(*batch_sampler_, plan_options(options_));
}

std::optional<std::int64_t> BatchSamplerShard::batch_size() const {
  return batch_sampler_->batch_size();
}

bool BatchSamplerShard::drop_last() const { return batch_sampler_->drop_last(); }

std::shared_ptr<Sampler> BatchSamplerShard::sampler() const { return batch_sampler_->sampler(); }

std::shared_ptr<BatchIndexSampler> BatchSamplerShard::with_sampler(
    std::shared_ptr<Sampler> sampler) const {
  auto inner = batch_sampler_->with_sampler(std::move(sampler));
  if (!inner) return nullptr;
  return std::make_shared<BatchSamplerShard>(std::move(inner), options_);
}

std::optional<std::int64_t> BatchSamplerShard::total_length() const {
  return batch_sampler_->size();
}

SkipBatchSampler::SkipBatchSampler(std::shared_ptr<BatchIndexSampler> batch_sampler,
                                   std::int64_t skip_batches)
    : batch_sampler_(std::move(batch_sampler)), skip_batches_(skip_batches) {
  if (!batch_sampler_) throw ArgumentError("SkipBatchSampler needs a batch sampler.");
  if (skip_batches < 0) {
    throw ArgumentError(
        str("skip_batches is ", skip_batches, ". It is a number of batches: 0 or more."));
  }
}

std::unique_ptr<BatchIndexStream> SkipBatchSampler::begin(std::int64_t epoch,
                                                          const at::Tensor& generator_state) {
  return std::make_unique<SkippingStream>(batch_sampler_->begin(epoch, generator_state),
                                          skip_batches_);
}

std::optional<std::int64_t> SkipBatchSampler::size() const {
  const auto size = batch_sampler_->size();
  if (!size) return std::nullopt;
  return std::max<std::int64_t>(0, *size - skip_batches_);
}

std::optional<std::int64_t> SkipBatchSampler::batch_size() const {
  return batch_sampler_->batch_size();
}

bool SkipBatchSampler::drop_last() const { return batch_sampler_->drop_last(); }

std::shared_ptr<Sampler> SkipBatchSampler::sampler() const { return batch_sampler_->sampler(); }

std::shared_ptr<BatchIndexSampler> SkipBatchSampler::with_sampler(
    std::shared_ptr<Sampler> sampler) const {
  auto inner = batch_sampler_->with_sampler(std::move(sampler));
  if (!inner) return nullptr;
  return std::make_shared<SkipBatchSampler>(std::move(inner), skip_batches_);
}

std::optional<std::int64_t> SkipBatchSampler::total_length() const {
  return batch_sampler_->size();
}

}  // namespace accelerate
