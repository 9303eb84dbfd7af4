// accelerate/data/batch_samplers.h - which indices make up each batch, and which process gets it.
//
//     auto batches = std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(10), 4,
//     false); BatchSamplerShard shard(batches, {.num_processes = 2, .process_index = 1}); for (auto
//     pass = shard.begin(0); const auto batch = pass->next();) use(*batch);
//
// accelerate/data/sampler_adaptors.h lets batch samplers of your own take the place of
// `BatchSampler`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

class Sampler;

using IndexBatch = std::vector<std::int64_t>;

/// How much of a pass was left out.
struct SkippedBatches {
  std::int64_t batches = 0;
  std::int64_t samples = 0;

  bool operator==(const SkippedBatches&) const = default;
};

/// The batches of one pass, in order. For one thread.
class ACCELERATE_API BatchIndexStream {
 public:
  virtual ~BatchIndexStream();

  /// The next batch, or nothing at the end.
  virtual std::optional<IndexBatch> next() = 0;
  /// Leaves out `batches` batches, or those that are left, and says what they held. Constant time
  /// where the order is known without walking it.
  virtual SkippedBatches skip(std::int64_t batches);
  /// Goes, ahead or back, to where `samples` indices in `batches` batches have been handed out
  /// since the pass began: at the sample where batches are cut from a stream of indices, which may
  /// be cut otherwise than they were; at the batch elsewhere.
  virtual void seek(std::int64_t samples, std::int64_t batches) = 0;
  /// As `IndexStream::generator_state`.
  [[nodiscard]] virtual at::Tensor generator_state() const;
};

/// Groups indices into batches.
class ACCELERATE_API BatchIndexSampler {
 public:
  virtual ~BatchIndexSampler();

  /// As `Sampler::begin`.
  [[nodiscard]] virtual std::unique_ptr<BatchIndexStream> begin(
      std::int64_t epoch, const at::Tensor& generator_state = {}) = 0;
  /// How many batches a pass has, where that is known.
  [[nodiscard]] virtual std::optional<std::int64_t> size() const = 0;
  /// The length of a full batch; nothing where batches have no common one.
  [[nodiscard]] virtual std::optional<std::int64_t> batch_size() const { return std::nullopt; }
  /// Whether the samples that do not fill the last batches are left out.
  [[nodiscard]] virtual bool drop_last() const { return false; }
  /// Where the indices come from; null where there is no such thing.
  [[nodiscard]] virtual std::shared_ptr<Sampler> sampler() const;
  /// The same batches of another sampler's indices; null where `sampler()` is.
  [[nodiscard]] virtual std::shared_ptr<BatchIndexSampler> with_sampler(
      std::shared_ptr<Sampler> sampler) const;
};

/// Consecutive indices of a sampler, `batch_size` at a time.
class ACCELERATE_API BatchSampler : public BatchIndexSampler {
 public:
  /// Throws `ArgumentError` for a batch size below one.
  BatchSampler(std::shared_ptr<Sampler> sampler, std::int64_t batch_size, bool drop_last);

  [[nodiscard]] std::unique_ptr<BatchIndexStream> begin(
      std::int64_t epoch, const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override;
  [[nodiscard]] std::optional<std::int64_t> batch_size() const override { return batch_size_; }
  [[nodiscard]] bool drop_last() const override { return drop_last_; }
  [[nodiscard]] std::shared_ptr<Sampler> sampler() const override { return sampler_; }
  [[nodiscard]] std::shared_ptr<BatchIndexSampler> with_sampler(
      std::shared_ptr<Sampler> sampler) const override;

 private:
  std::shared_ptr<Sampler> sampler_;
  std::int64_t batch_size_;
  bool drop_last_;
};

struct BatchSamplerShardOptions {
  int num_processes = 1;
  int process_index = 0;
  /// Cut each batch into one part per process, instead of dealing out whole batches.
  bool split_batches = false;
  /// Repeat samples from the start of the pass so that all processes see equally many batches.
  bool even_batches = true;
};

/// The batches of one process, when several share out the batches of one batch sampler.
///
/// Batch i belongs to process i % num_processes; num_processes batches are a round. Every round but
/// the last is handed out as it is. In the last one samples may be missing: it is left out
/// (drop_last), filled up from the start of the pass (even_batches), or given to the processes for
/// which there is something.
class ACCELERATE_API BatchSamplerShard : public BatchIndexSampler {
 public:
  /// Throws `ArgumentError` where `split_batches` meets a batch size that the processes cannot
  /// share equally.
  explicit BatchSamplerShard(std::shared_ptr<BatchIndexSampler> batch_sampler,
                             const BatchSamplerShardOptions& options = {});

  [[nodiscard]] std::unique_ptr<BatchIndexStream> begin(
      std::int64_t epoch, const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override;
  [[nodiscard]] std::optional<std::int64_t> batch_size() const override;
  [[nodiscard]] bool drop_last() const override;
  [[nodiscard]] std::shared_ptr<Sampler> sampler() const override;
  [[nodiscard]] std::shared_ptr<BatchIndexSampler> with_sampler(
      std::shared_ptr<Sampler> sampler) const override;

  /// Batches of all processes together.
  [[nodiscard]] std::optional<std::int64_t> total_length() const;

 private:
  std::shared_ptr<BatchIndexSampler> batch_sampler_;
  BatchSamplerShardOptions options_;
};

/// All batches of another batch sampler but the first ones.
class ACCELERATE_API SkipBatchSampler : public BatchIndexSampler {
 public:
  /// Throws `ArgumentError` for a negative number.
  explicit SkipBatchSampler(std::shared_ptr<BatchIndexSampler> batch_sampler,
                            std::int64_t skip_batches = 0);

  [[nodiscard]] std::unique_ptr<BatchIndexStream> begin(
      std::int64_t epoch, const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override;
  [[nodiscard]] std::optional<std::int64_t> batch_size() const override;
  [[nodiscard]] bool drop_last() const override;
  [[nodiscard]] std::shared_ptr<Sampler> sampler() const override;
  [[nodiscard]] std::shared_ptr<BatchIndexSampler> with_sampler(
      std::shared_ptr<Sampler> sampler) const override;

  /// Batches of the other one, skipped ones included.
  [[nodiscard]] std::optional<std::int64_t> total_length() const;

 private:
  std::shared_ptr<BatchIndexSampler> batch_sampler_;
  std::int64_t skip_batches_;
};

}  // namespace accelerate
