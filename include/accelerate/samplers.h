// accelerate/samplers.h - the order in which a data loader visits a dataset.
//
//     RandomSampler sampler(dataset_size, {.generator = generator});
//     for (auto pass = sampler.begin(epoch); const auto index = next_index(*pass);) use(*index);
//
// The samplers of Python's torch, by their names: from the same generator they draw the same
// numbers in the same order. accelerate/data/sampler_adaptors.h lets the samplers of LibTorch, your
// own types and plain lists of indices take their place.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

/// The indices of one pass, in order. Several passes over one sampler may be under way; each of
/// them is for one thread.
class ACCELERATE_API IndexStream {
 public:
  virtual ~IndexStream();

  /// Writes the next indices to `out` and returns how many: fewer than it holds only at the end.
  virtual std::size_t take(std::span<std::int64_t> out) = 0;
  /// Leaves out `count` indices and returns how many there were. Constant time where the order is
  /// known without walking it: sequences, permutations, lists.
  virtual std::int64_t skip(std::int64_t count);
  /// Goes back to the first index, in the same order.
  virtual void rewind() = 0;
  /// The state (uint8) that the generator of this order had when the pass began. Not defined where
  /// the order comes from no generator.
  [[nodiscard]] virtual at::Tensor generator_state() const;
};

/// The next index, or nothing at the end.
[[nodiscard]] ACCELERATE_API std::optional<std::int64_t> next_index(IndexStream& stream);

/// Decides the order of each pass.
class ACCELERATE_API Sampler {
 public:
  virtual ~Sampler();

  /// Begins a pass and draws its order; numbers with replacement are drawn as they are asked for.
  /// `generator_state`, where defined, is that of an earlier pass, whose order is repeated.
  [[nodiscard]] virtual std::unique_ptr<IndexStream> begin(
      std::int64_t epoch, const at::Tensor& generator_state = {}) = 0;
  /// How many indices a pass has, where that is known.
  [[nodiscard]] virtual std::optional<std::int64_t> size() const = 0;

  /// Whether the order can be drawn from a generator of the sampler's own, and the one it has.
  /// Processes that share out one order must hold equal ones.
  [[nodiscard]] virtual bool can_own_generator() const { return false; }
  [[nodiscard]] virtual std::optional<at::Generator> generator() const { return std::nullopt; }
  /// Whether `begin` may draw from Torch's default generator. Then processes that share out one
  /// order agree on the state of that before each pass.
  [[nodiscard]] virtual bool draws_from_default_generator() const { return true; }
  /// Throws `UnsupportedError` where there can be none.
  virtual void set_generator(at::Generator generator);
};

/// 0, 1, ..., size - 1.
class ACCELERATE_API SequentialSampler : public Sampler {
 public:
  explicit SequentialSampler(std::int64_t size);

  [[nodiscard]] std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                                   const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override { return size_; }
  [[nodiscard]] bool draws_from_default_generator() const override { return false; }

 private:
  std::int64_t size_;
};

/// The indices that are given, in their order.
class ACCELERATE_API ListSampler : public Sampler {
 public:
  explicit ListSampler(const std::vector<std::int64_t>& indices);

  [[nodiscard]] std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                                   const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override { return indices_.numel(); }
  [[nodiscard]] bool draws_from_default_generator() const override { return false; }

 private:
  at::Tensor indices_;  // [size], int64
};

/// A sampler that draws, from a generator of its own or from Torch's default one.
class ACCELERATE_API DrawingSampler : public Sampler {
 public:
  [[nodiscard]] bool can_own_generator() const override { return true; }
  [[nodiscard]] std::optional<at::Generator> generator() const override { return generator_; }
  [[nodiscard]] bool draws_from_default_generator() const override { return !generator_; }
  void set_generator(at::Generator generator) override { generator_ = std::move(generator); }

 protected:
  explicit DrawingSampler(std::optional<at::Generator> generator);

 private:
  std::optional<at::Generator> generator_;
};

struct RandomSamplerOptions {
  /// Draw each index from all of them: an index may come several times.
  bool replacement = false;
  /// How many indices a pass has; as many as the dataset where not set.
  std::optional<std::int64_t> num_samples = std::nullopt;
  /// Where the order is drawn from. Without one, each pass has its own, seeded from the default.
  std::optional<at::Generator> generator = std::nullopt;
};

/// The dataset in a new random order each pass.
class ACCELERATE_API RandomSampler : public DrawingSampler {
 public:
  /// Throws `ArgumentError` where a pass would have no indices.
  explicit RandomSampler(std::int64_t dataset_size, RandomSamplerOptions options = {});

  [[nodiscard]] std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                                   const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override { return num_samples(); }

  [[nodiscard]] std::int64_t dataset_size() const { return dataset_size_; }
  [[nodiscard]] bool replacement() const { return replacement_; }
  [[nodiscard]] std::int64_t num_samples() const { return num_samples_; }

 private:
  std::int64_t dataset_size_;
  bool replacement_;
  std::int64_t num_samples_;
};

struct SeedableRandomSamplerOptions {
  bool replacement = false;
  std::optional<std::int64_t> num_samples = std::nullopt;
  std::optional<at::Generator> generator = std::nullopt;
  /// The seed of epoch 0; that of Torch's default generator where not set.
  std::optional<std::int64_t> data_seed = std::nullopt;
};

/// A random order that depends on seed and epoch alone: the generator is seeded with
/// `initial_seed() + epoch` before each pass.
class ACCELERATE_API SeedableRandomSampler : public RandomSampler {
 public:
  explicit SeedableRandomSampler(std::int64_t dataset_size,
                                 SeedableRandomSamplerOptions options = {});

  [[nodiscard]] std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                                   const at::Tensor& generator_state = {}) override;

  [[nodiscard]] bool draws_from_default_generator() const override { return false; }

  [[nodiscard]] std::uint64_t initial_seed() const { return initial_seed_; }
  void set_initial_seed(std::uint64_t seed) { initial_seed_ = seed; }

 private:
  std::uint64_t initial_seed_;
};

/// The indices that are given, in a new random order each pass.
class ACCELERATE_API SubsetRandomSampler : public DrawingSampler {
 public:
  explicit SubsetRandomSampler(const std::vector<std::int64_t>& indices,
                               std::optional<at::Generator> generator = std::nullopt);

  [[nodiscard]] std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                                   const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override { return indices_.numel(); }

 private:
  at::Tensor indices_;  // [size], int64
};

/// `num_samples` indices, each drawn with a probability in proportion to its weight.
class ACCELERATE_API WeightedRandomSampler : public DrawingSampler {
 public:
  /// Throws `ArgumentError` for `num_samples` below one, or weights that are no list.
  WeightedRandomSampler(const at::Tensor& weights, std::int64_t num_samples,
                        bool replacement = true,
                        std::optional<at::Generator> generator = std::nullopt);
  WeightedRandomSampler(const std::vector<double>& weights, std::int64_t num_samples,
                        bool replacement = true,
                        std::optional<at::Generator> generator = std::nullopt);

  [[nodiscard]] std::unique_ptr<IndexStream> begin(std::int64_t epoch,
                                                   const at::Tensor& generator_state = {}) override;
  [[nodiscard]] std::optional<std::int64_t> size() const override { return num_samples_; }

 private:
  at::Tensor weights_;  // [indices], double
  std::int64_t num_samples_;
  bool replacement_;
};

}  // namespace accelerate
