#include "data/batch_plan.h"

#include <algorithm>
#include <utility>

#include "accelerate/detail/core/split_range.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::data {
namespace {

IndexBatch joined(const std::vector<IndexBatch>& batches) {
  IndexBatch all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

IndexBatch cut(const IndexBatch& samples, std::int64_t begin, std::int64_t end) {
  const auto size = std::ssize(samples);
  return {samples.begin() + std::min(begin, size), samples.begin() + std::min(end, size)};
}

/// The numbers [begin, begin + length) of `samples` followed by `repeated` over and over.
IndexBatch cut_filled(const IndexBatch& samples, const IndexBatch& repeated, std::int64_t begin,
                      std::int64_t length) {
  if (repeated.empty()) return cut(samples, begin, begin + length);
  IndexBatch part;
  part.reserve(static_cast<std::size_t>(length));
  const auto genuine = std::ssize(samples);
  for (auto i = begin; i < begin + length; ++i) {
    part.push_back(i < genuine
                       ? samples[static_cast<std::size_t>(i)]
                       : repeated[static_cast<std::size_t>((i - genuine) % std::ssize(repeated))]);
  }
  return part;
}

std::int64_t divided_up(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }

}  // namespace

void check_batch_size_is_possible(std::int64_t batch_size) {
  constexpr std::int64_t kLargest = std::int64_t{1} << 40;
  if (batch_size <= kLargest) return;
  throw ArgumentError(str("batch_size is ", batch_size, ", but a batch has at most ", kLargest,
                          " samples (2^40). To load all data at once pass their number."));
}

void check_filling(std::int64_t genuine, std::int64_t size) {
  constexpr std::int64_t kMostRepeats = 1000;
  constexpr std::int64_t kAlwaysAllowed = 1 << 20;
  if (size <= kAlwaysAllowed || size / std::max<std::int64_t>(genuine, 1) <= kMostRepeats) return;
  throw ArgumentError(str(
      "batch_size asks for ", size, " samples, but the data have only ", genuine,
      ", which would be repeated ", size / std::max<std::int64_t>(genuine, 1),
      " times so that all processes get full batches. Lower batch_size, or leave the last batch "
      "out (drop_last)."));
}

void check_process(int num_processes, int process_index) {
  if (process_index >= 0 && process_index < num_processes) return;
  throw ArgumentError(str("There is no process ", process_index, " of ", num_processes,
                          ": process_index counts from 0 to num_processes - 1."));
}

void validate(const PlanOptions& options, const BatchIndexSampler& batch_sampler) {
  check_process(options.num_processes, options.process_index);
  if (!options.split_batches) return;
  const auto batch_size = batch_sampler.batch_size();
  if (batch_size && *batch_size > 0 && *batch_size % options.num_processes == 0) return;
  throw ArgumentError(str("To use `BatchSamplerShard` in `split_batches` mode, the batch size (",
                          batch_size ? str(*batch_size) : "none",
                          ") needs to be a round multiple of the number of ", "processes (",
                          options.num_processes, ")."));
}

std::optional<std::int64_t> planned_size(const BatchIndexSampler& batch_sampler,
                                         const PlanOptions& options) {
  const auto total = batch_sampler.size();
  if (!total || options.split_batches) return total;
  const auto rounds = *total / options.num_processes;
  const auto left = *total % options.num_processes;
  if (left == 0 || batch_sampler.drop_last()) return rounds;
  return rounds + (options.even_batches || options.process_index < left ? 1 : 0);
}

BatchPlan::BatchPlan(const std::shared_ptr<BatchIndexSampler>& batch_sampler,
                     const PlanOptions& options, std::int64_t epoch, const PlanPosition& from)
    : options_(options) {
  if (!batch_sampler) throw ArgumentError("A plan of batches needs a batch sampler.");
  validate(options, *batch_sampler);
  batch_size_ = batch_sampler->batch_size();
  drop_last_ = batch_sampler->drop_last();
  size_ = planned_size(*batch_sampler, options);
  stream_ = batch_sampler->begin(epoch, from.generator_state);
  ahead_ = stream_->next();
  round_ = read_round();
  first_round_ = round_.batches;
  if (from.samples == 0 && from.batches == 0) return;

  stream_->seek(from.samples, from.batches);
  samples_ = from.samples;
  batches_ = from.batches;
  remainder_ = -1;
  padded_size_ = -1;
  ahead_ = stream_->next();
  round_ = read_round();
}

std::optional<PlannedBatch> BatchPlan::next() {
  if (!gives(round_)) return std::nullopt;
  leave_round();
  PlannedBatch planned;
  planned.facts.samples_after = samples_;
  planned.facts.batches_after = batches_;
  planned.indices = part_of(std::exchange(round_, read_round()));
  planned.facts.last = !gives(round_);
  if (planned.facts.last) {
    planned.facts.remainder = remainder_;
    planned.facts.padded_size = padded_size_;
  }
  return planned;
}

void BatchPlan::skip(std::int64_t batches) {
  if (batches <= 0) return;
  leave_round();
  auto to_pass = (batches - 1) * batches_per_round();
  if (to_pass > 0 && ahead_) {
    const auto passed = stream_->skip(to_pass - 1);
    samples_ += std::ssize(*ahead_) + passed.samples;
    batches_ += 1 + passed.batches;
    ahead_ = passed.batches == to_pass - 1 ? stream_->next() : std::nullopt;
  }
  round_ = read_round();
}

std::int64_t BatchPlan::batches_per_round() const {
  return options_.split_batches ? 1 : options_.num_processes;
}

BatchPlan::Round BatchPlan::read_round() {
  Round round;
  while (ahead_ && std::ssize(round.batches) < batches_per_round()) {
    round.samples += std::ssize(*ahead_);
    round.batches.push_back(std::move(*ahead_));
    ahead_ = stream_->next();
  }
  round.final = !ahead_;
  if (round.final && !round.batches.empty() && !drop_last_) {
    remainder_ = complete(round) ? 0 : round.samples;
    padded_size_ = options_.even_batches ? filled_size(round) : round.samples;
  }
  return round;
}

void BatchPlan::leave_round() {
  samples_ += round_.samples;
  batches_ += std::ssize(round_.batches);
}

/// How long the part of each process is when nothing is missing.
std::int64_t BatchPlan::full_length(const Round& round) const {
  if (options_.split_batches) {
    return divided_up(std::max(*batch_size_, round.samples), options_.num_processes);
  }
  std::int64_t longest = 0;
  for (const auto& batch : round.batches) longest = std::max(longest, std::ssize(batch));
  const bool all_short = options_.num_processes > 1 && longest < *batch_size_ &&
                         std::ssize(round.batches) == batches_per_round();
  return all_short ? longest : std::max(longest, *batch_size_);
}

bool BatchPlan::complete(const Round& round) const {
  if (!batch_size_) return std::ssize(round.batches) == batches_per_round();
  return round.samples == full_length(round) * options_.num_processes;
}

/// Samples of a last round once nothing is missing.
std::int64_t BatchPlan::filled_size(const Round& round) const {
  if (batch_size_) return full_length(round) * options_.num_processes;
  auto size = round.samples;
  const auto& repeated = first_round_.empty() ? round.batches : first_round_;
  for (auto i = std::ssize(round.batches); i < batches_per_round(); ++i) {
    const auto missing = static_cast<std::size_t>(i - std::ssize(round.batches));
    size += std::ssize(repeated[missing % repeated.size()]);
  }
  return size;
}

bool BatchPlan::gives(const Round& round) const {
  if (round.batches.empty()) return false;
  const bool as_it_is = options_.num_processes == 1 && !options_.even_batches;
  if (as_it_is || !round.final || complete(round)) return true;
  if (drop_last_) return false;
  if (options_.even_batches) return true;
  if (!options_.split_batches) return options_.process_index < std::ssize(round.batches);
  return options_.process_index * full_length(round) < round.samples;
}

IndexBatch BatchPlan::part_of(Round round) const {
  const auto process = static_cast<std::size_t>(options_.process_index);
  if (round.final && options_.even_batches && !complete(round)) return filled_part_of(round);
  if (!options_.split_batches) return std::move(round.batches[process]);

  const auto& batch = round.batches.front();
  if (round.final || complete(round)) {
    const auto length = full_length(round);
    return cut(batch, options_.process_index * length, (options_.process_index + 1) * length);
  }
  // A short batch before the end: everyone gets a part, or the processes would fall out of step.
  if (round.samples < options_.num_processes) {
    return cut_filled(batch, joined(first_round_), options_.process_index, 1);
  }
  const auto range = split_range(round.samples, options_.num_processes, options_.process_index);
  return cut(batch, range.start, range.end);
}

IndexBatch BatchPlan::filled_part_of(const Round& round) const {
  if (!batch_size_) {
    const auto missing = options_.process_index - std::ssize(round.batches);
    if (missing < 0) return round.batches[static_cast<std::size_t>(options_.process_index)];
    return first_round_[static_cast<std::size_t>(missing % std::ssize(first_round_))];
  }
  const auto length = full_length(round);
  const auto first = joined(first_round_);
  check_filling(std::ssize(first), length);
  return cut_filled(joined(round.batches), first, options_.process_index * length, length);
}

}  // namespace accelerate::detail::data
