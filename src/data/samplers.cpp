#include "accelerate/samplers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;

constexpr auto kIndices = at::kLong;

/// Python draws indices with replacement in blocks of so many; a generator that is shared must
/// stand where it would stand there.
constexpr std::int64_t kDrawsAtOnce = 32;

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

void reseed(at::Generator& generator, std::uint64_t seed) {
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

at::Generator private_generator_at(const at::Tensor& state) {
  auto generator = at::detail::createCPUGenerator();
  set_state(generator, state);
  return generator;
}

/// The seed that Python's RandomSampler takes from the default generator for each pass.
std::uint64_t drawn_seed() {
  return static_cast<std::uint64_t>(at::empty({}, at::kLong).random_().item<std::int64_t>());
}

/// Positions on an order of known length.
class Cursor {
 public:
  explicit Cursor(std::int64_t size) : size_(size) {}

  [[nodiscard]] std::int64_t position() const { return position_; }
  [[nodiscard]] std::int64_t left() const { return size_ - position_; }
  std::int64_t advance(std::int64_t count) {
    count = std::min(std::max<std::int64_t>(count, 0), left());
    position_ += count;
    return count;
  }
  void rewind() { position_ = 0; }

 private:
  std::int64_t size_;
  std::int64_t position_ = 0;
};

class SequentialStream final : public IndexStream {
 public:
  explicit SequentialStream(std::int64_t size) : cursor_(size) {}

  std::size_t take(std::span<std::int64_t> out) override {
    auto index = cursor_.position();
    const auto taken = cursor_.advance(std::ssize(out));
    for (auto& slot : out.first(static_cast<std::size_t>(taken))) slot = index++;
    return static_cast<std::size_t>(taken);
  }
  std::int64_t skip(std::int64_t count) override { return cursor_.advance(count); }
  void rewind() override { cursor_.rewind(); }

 private:
  Cursor cursor_;
};

/// Indices that are all there.
class TensorStream final : public IndexStream {
 public:
  explicit TensorStream(at::Tensor indices, at::Tensor generator_state = {})
      : indices_(indices.contiguous()),
        generator_state_(std::move(generator_state)),
        cursor_(indices_.numel()) {}

  std::size_t take(std::span<std::int64_t> out) override {
    const auto* from = indices_.const_data_ptr<std::int64_t>() + cursor_.position();
    const auto taken = cursor_.advance(std::ssize(out));
    std::copy_n(from, taken, out.begin());
    return static_cast<std::size_t>(taken);
  }
  std::int64_t skip(std::int64_t count) override { return cursor_.advance(count); }
  void rewind() override { cursor_.rewind(); }
  [[nodiscard]] at::Tensor generator_state() const override { return generator_state_; }

 private:
  at::Tensor indices_;  // [size], int64
  at::Tensor generator_state_;
  Cursor cursor_;
};

/// Draws as it goes, block by block: one permutation after the other, or numbers with replacement.
class RandomStream final : public IndexStream {
 public:
  enum class Ownership : std::uint8_t { kPrivate, kShared };

  RandomStream(const RandomSampler& sampler, at::Generator generator, Ownership ownership)
      : dataset_size_(sampler.dataset_size()),
        replacement_(sampler.replacement()),
        generator_(std::move(generator)),
        ownership_(ownership),
        generator_state_(state_of(generator_)),
        num_samples_(sampler.num_samples()),
        cursor_(num_samples_) {
    // At once: whatever others draw from the generator before the first index is asked for.
    if (!replacement_) draw(num_samples_);
  }

  std::size_t take(std::span<std::int64_t> out) override {
    std::size_t taken = 0;
    while (taken < out.size() && cursor_.left() > 0) {
      const auto wanted = std::ssize(out) - static_cast<std::ptrdiff_t>(taken);
      if (cursor_.position() == block_end()) draw(wanted);
      const auto* from =
          block_.const_data_ptr<std::int64_t>() + (cursor_.position() - block_begin_);
      const auto count = cursor_.advance(std::min(wanted, block_end() - cursor_.position()));
      std::copy_n(from, count, out.begin() + static_cast<std::ptrdiff_t>(taken));
      taken += static_cast<std::size_t>(count);
    }
    if (taken < out.size()) finish();
    return taken;
  }

  std::int64_t skip(std::int64_t count) override {
    std::int64_t skipped = 0;
    while (skipped < count && cursor_.left() > 0) {
      if (cursor_.position() == block_end()) draw(std::min(count - skipped, kSkippedAtOnce));
      skipped += cursor_.advance(std::min(count - skipped, block_end() - cursor_.position()));
    }
    if (skipped < count) finish();
    return skipped;
  }

  void rewind() override {
    cursor_.rewind();
    if (block_begin_ == 0 && !finished_) return;  // what was drawn first is still here
    set_state(generator_, generator_state_);
    block_ = at::Tensor();
    block_begin_ = 0;
    finished_ = false;
  }

  [[nodiscard]] at::Tensor generator_state() const override { return generator_state_; }

 private:
  static constexpr std::int64_t kSkippedAtOnce = 1 << 16;

  [[nodiscard]] std::int64_t block_end() const {
    return block_begin_ + (block_.defined() ? block_.numel() : 0);
  }

  void draw(std::int64_t wanted) {
    block_begin_ = block_end();
    if (replacement_) {
      const auto rounded = (wanted + kDrawsAtOnce - 1) / kDrawsAtOnce * kDrawsAtOnce;
      const auto size = std::min(rounded, num_samples_ - block_begin_);
      block_ = at::randint(dataset_size_, {size}, generator_, kIndices);
    } else {
      block_ = at::randperm(dataset_size_, generator_, kIndices);
    }
  }

  /// Python draws one more permutation at the end even if it needs no index of it. Who shares the
  /// generator would see the difference.
  void finish() {
    const bool python_draws = !replacement_ && num_samples_ % dataset_size_ == 0;
    if (!python_draws || ownership_ == Ownership::kPrivate || finished_) return;
    finished_ = true;
    std::ignore = at::randperm(dataset_size_, generator_, kIndices);
  }

  std::int64_t dataset_size_;
  bool replacement_;
  at::Generator generator_;
  Ownership ownership_;
  at::Tensor generator_state_;
  std::int64_t num_samples_;
  Cursor cursor_;
  at::Tensor block_;  // the indices from block_begin_ on
  std::int64_t block_begin_ = 0;
  bool finished_ = false;  // drawn beyond the last index
};

/// Draws one order in one go, from the sampler's own generator or from the default one. An order
/// that is repeated leaves the default generator alone: others draw from it as well.
template <class Draw>
std::unique_ptr<IndexStream> draw_order(std::optional<at::Generator> own, const at::Tensor& state,
                                        const Draw& draw) {
  if (!own && state.defined()) {
    return std::make_unique<TensorStream>(draw(private_generator_at(state)), state);
  }
  auto generator = own ? *own : at::detail::getDefaultCPUGenerator();
  if (state.defined()) set_state(generator, state);
  auto begun_at = state_of(generator);
  return std::make_unique<TensorStream>(draw(generator), std::move(begun_at));
}

std::int64_t checked_num_samples(std::int64_t num_samples) {
  if (num_samples > 0) return num_samples;
  throw ArgumentError(str("num_samples should be a positive integer value, but got num_samples=",
                          num_samples, ". A random sampler needs at least one sample to draw."));
}

std::uint64_t initial_seed_of(const std::optional<std::int64_t>& data_seed) {
  if (data_seed) return static_cast<std::uint64_t>(*data_seed);
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.current_seed();
}

}  // namespace

IndexStream::~IndexStream() = default;

std::int64_t IndexStream::skip(std::int64_t count) {
  std::array<std::int64_t, 512> passed{};
  std::int64_t skipped = 0;
  while (skipped < count) {
    const auto wanted = std::min<std::int64_t>(count - skipped, std::ssize(passed));
    const auto taken =
        static_cast<std::int64_t>(take(std::span(passed).first(static_cast<std::size_t>(wanted))));
    skipped += taken;
    if (taken < wanted) break;
  }
  return skipped;
}

at::Tensor IndexStream::generator_state() const { return {}; }

std::optional<std::int64_t> next_index(IndexStream& stream) {
  std::int64_t index = 0;
  if (stream.take({&index, 1}) == 0) return std::nullopt;
  return index;
}

Sampler::~Sampler() = default;

void Sampler::set_generator(at::Generator /*generator*/) {
  throw UnsupportedError("This sampler does not draw from a generator, so it cannot be given one.");
}

SequentialSampler::SequentialSampler(std::int64_t size) : size_(size) {
  if (size < 0) throw ArgumentError(str("A sampler cannot have ", size, " indices."));
}

std::unique_ptr<IndexStream> SequentialSampler::begin(std::int64_t /*epoch*/,
                                                      const at::Tensor& /*generator_state*/) {
  return std::make_unique<SequentialStream>(size_);
}

ListSampler::ListSampler(const std::vector<std::int64_t>& indices)
    : indices_(at::tensor(indices, kIndices)) {}

std::unique_ptr<IndexStream> ListSampler::begin(std::int64_t /*epoch*/,
                                                const at::Tensor& /*generator_state*/) {
  return std::make_unique<TensorStream>(indices_);
}

DrawingSampler::DrawingSampler(std::optional<at::Generator> generator)
    : generator_(std::move(generator)) {}

RandomSampler::RandomSampler(std::int64_t dataset_size, RandomSamplerOptions options)
    : DrawingSampler(std::move(options.generator)),
      dataset_size_(dataset_size),
      replacement_(options.replacement),
      num_samples_(checked_num_samples(options.num_samples.value_or(dataset_size))) {
  if (dataset_size <= 0) {
    throw ArgumentError(str("A random sampler cannot draw from ", dataset_size, " samples."));
  }
}

std::unique_ptr<IndexStream> RandomSampler::begin(std::int64_t /*epoch*/,
                                                  const at::Tensor& generator_state) {
  using Ownership = RandomStream::Ownership;
  if (auto own = generator()) {
    if (generator_state.defined()) set_state(*own, generator_state);
    return std::make_unique<RandomStream>(*this, *own, Ownership::kShared);
  }
  auto generator = generator_state.defined() ? private_generator_at(generator_state)
                                             : at::detail::createCPUGenerator(drawn_seed());
  return std::make_unique<RandomStream>(*this, std::move(generator), Ownership::kPrivate);
}

SeedableRandomSampler::SeedableRandomSampler(std::int64_t dataset_size,
                                             SeedableRandomSamplerOptions options)
    : RandomSampler(dataset_size, {.replacement = options.replacement,
                                   .num_samples = options.num_samples,
                                   .generator = std::move(options.generator)}),
      initial_seed_(initial_seed_of(options.data_seed)) {}

std::unique_ptr<IndexStream> SeedableRandomSampler::begin(std::int64_t epoch,
                                                          const at::Tensor& generator_state) {
  const auto own = generator();
  auto generator = own ? *own : at::detail::createCPUGenerator();
  if (generator_state.defined()) {
    set_state(generator, generator_state);
  } else {
    reseed(generator, initial_seed_ + static_cast<std::uint64_t>(epoch));
  }
  using Ownership = RandomStream::Ownership;
  return std::make_unique<RandomStream>(*this, std::move(generator),
                                        own ? Ownership::kShared : Ownership::kPrivate);
}

SubsetRandomSampler::SubsetRandomSampler(const std::vector<std::int64_t>& indices,
                                         std::optional<at::Generator> generator)
    : DrawingSampler(std::move(generator)), indices_(at::tensor(indices, kIndices)) {}

std::unique_ptr<IndexStream> SubsetRandomSampler::begin(std::int64_t /*epoch*/,
                                                        const at::Tensor& generator_state) {
  return draw_order(generator(), generator_state, [&](const at::Generator& from) {
    return indices_.index_select(0, at::randperm(indices_.numel(), from, kIndices));
  });
}

WeightedRandomSampler::WeightedRandomSampler(const at::Tensor& weights, std::int64_t num_samples,
                                             bool replacement,
                                             std::optional<at::Generator> generator)
    : DrawingSampler(std::move(generator)),
      weights_(weights.to(at::kCPU, at::kDouble)),
      num_samples_(checked_num_samples(num_samples)),
      replacement_(replacement) {
  if (weights.dim() != 1) {
    throw ArgumentError(str("weights should be a 1d sequence but given weights have shape [",
                            detail::join(weights.sizes()), "]."));
  }
}

WeightedRandomSampler::WeightedRandomSampler(const std::vector<double>& weights,
                                             std::int64_t num_samples, bool replacement,
                                             std::optional<at::Generator> generator)
    : WeightedRandomSampler(at::tensor(weights, at::kDouble), num_samples, replacement,
                            std::move(generator)) {}

std::unique_ptr<IndexStream> WeightedRandomSampler::begin(std::int64_t /*epoch*/,
                                                          const at::Tensor& generator_state) {
  return draw_order(generator(), generator_state, [&](const at::Generator& from) {
    return at::multinomial(weights_, num_samples_, replacement_, from);
  });
}

}  // namespace accelerate
