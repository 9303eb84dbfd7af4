// Process 0 reads, every process gets its part. A round is what the processes are given together:
// one batch of the loader for each of them, or one cut into parts (split_batches). Per round there
// is one message that says what comes, and one with all tensors in it.
#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "accelerate/data/prepare_options.h"
#include "accelerate/detail/comm/collectives.h"
#include "accelerate/detail/core/split_range.h"
#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/objects.h"
#include "accelerate/operations/tensors.h"
#include "core/text.h"
#include "data/copy_stream.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

// ---- the rounds that process 0 reads ------------------------------------------------------------

struct RoundRules {
  std::int64_t batches_per_round = 1;
  std::int64_t num_parts = 1;
  /// Leave out a round that lacks batches.
  bool drop_last = false;
  /// Every tensor must have as many rows as the first one.
  bool equal_lengths = true;
};

/// What the processes are given together. In every round, not in the last one only,
/// `facts.remainder` and `facts.padded_size` are its samples without and with those that fill it
/// up.
struct DispatchRound {
  AnyBatch batch = {};
  BatchFacts facts = {};
};

/// Throws `ArgumentError` that names the leaf unless all leaves can be sent, and cut.
void check_leaves(const tree::Flat& leaves, const RoundRules& rules) {
  for (std::size_t i = 0; i < leaves.tensors.size(); ++i) {
    const auto& leaf = leaves.tensors[i];
    const auto& first = leaves.tensors.front();
    const auto what = [&] {
      return str("The batch cannot be dispatched: the tensor",
                 leaves.paths[i].empty() ? "" : str(" at ", leaves.paths[i]));
    };
    if (leaf.layout() != at::kStrided || leaf.is_nested()) {
      throw ArgumentError(str(what(), " is not dense. Make it so in the collate function, or set ",
                              "`dispatch_batches=False`."));
    }
    if (!rules.equal_lengths || rules.num_parts == 1) continue;
    if (leaf.dim() == 0) {
      throw ArgumentError(str(what(), " has no dimension to cut. Give it one, or set ",
                              "`dispatch_batches=False`."));
    }
    if (leaf.size(0) != first.size(0)) {
      throw ArgumentError(str(what(), " has ", leaf.size(0), " rows, that at ",
                              leaves.paths.front(), " has ", first.size(0),
                              ". All must have one row per sample, or pass a function that cuts ",
                              "them."));
    }
  }
}

/// `leaves` with `count` rows of `first`, taken over and over, behind those they have.
std::vector<at::Tensor> fill_up(const std::vector<at::Tensor>& leaves,
                                const std::vector<at::Tensor>& first, std::int64_t count) {
  std::vector<at::Tensor> filled;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto rows = at::arange(count, at::TensorOptions(at::kLong).device(first[i].device()))
                          .remainder(first[i].size(0));
    filled.push_back(at::cat({leaves[i], first[i].index_select(0, rows)}));
  }
  return filled;
}

/// Copies of the first rows, `count` at most.
std::vector<at::Tensor> first_rows(std::vector<at::Tensor> leaves, std::int64_t count) {
  for (auto& leaf : leaves) {
    // A copy: a view would keep the whole round.
    leaf = leaf.narrow(0, 0, std::min(count, leaf.size(0))).clone();
  }
  return leaves;
}

/// Throws the exception being handled on with what to do about batches that do not fit together.
[[noreturn]] void refuse_concatenation() {
  std::string text;
  try {
    throw;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  throw ArgumentError(
      str("The batches that the processes are to be given do not fit together: ", text,
          "\nBatches may differ in length only when they are dispatched, that is with "
          "`dispatch_batches=True` or an iterable dataset. Pass `dispatch_batches=False` to have "
          "each process load its own batch, or `split_batches=True` to have one batch cut into "
          "parts."));
}

class RoundReader {
 public:
  /// `at_start` says that `pass` begins with the first batch; if not, `reopen` reads the samples
  /// from the start of the data that fill up the last round.
  RoundReader(std::unique_ptr<Pass> pass, const BatchType& type, const RoundRules& rules,
              bool at_start, std::function<std::unique_ptr<Pass>()> reopen)
      : pass_(std::move(pass)),
        type_(type),
        rules_(rules),
        at_start_(at_start),
        reopen_(std::move(reopen)) {}

  /// Throws what the loader throws, and `ArgumentError` for batches that cannot be dispatched.
  std::optional<DispatchRound> next() {
    auto parts = ahead_ ? *std::exchange(ahead_, std::nullopt) : read();
    const bool drops = rules_.drop_last && rules_.batches_per_round > 1;
    if (drops && !parts.facts.last) {
      ahead_ = read();
      parts.facts.last = lacks_some(*ahead_);
    }
    if (parts.batches.empty() || (drops && lacks_some(parts))) return std::nullopt;

    DispatchRound round{joined(std::move(parts.batches)), std::move(parts.facts)};
    fill(round);
    return round;
  }

 private:
  struct Parts {
    std::vector<AnyBatch> batches = {};
    BatchFacts facts = {};
  };

  /// Up to as many batches as a round has, with the facts of the last one.
  Parts read() {
    Parts parts;
    while (!parts.facts.last && std::ssize(parts.batches) < rules_.batches_per_round) {
      auto loaded = pass_->next();
      if (!loaded) {
        parts.facts.last = true;
        break;
      }
      parts.facts = std::move(loaded->facts);
      parts.batches.push_back(std::move(loaded->batch));
    }
    return parts;
  }

  bool lacks_some(const Parts& parts) const {
    return std::ssize(parts.batches) < rules_.batches_per_round;
  }

  AnyBatch joined(std::vector<AnyBatch> batches) const {
    if (!comm::is_alone(nullptr)) {
      for (const auto& batch : batches) type_.refuse_others("dispatch_batches", batch);
    }
    AnyBatch first = std::move(batches.front());
    if (batches.size() == 1) return first;
    try {
      if (!type_.holds_tensors) comm::RefuseLeaf::other("concatenate", "", *type_.id);
      type_.refuse_others("concatenate", first);
      std::vector<tree::Flat> parts{type_.flatten(first)};
      for (std::size_t i = 1; i < batches.size(); ++i) parts.push_back(type_.flatten(batches[i]));
      type_.set_leaves(first, comm::TensorOps::concatenate(parts, /*dim=*/0));
    } catch (...) {
      refuse_concatenation();
    }
    return first;
  }

  /// Fills the round up where the parts would not be equal, or some would be empty.
  void fill(DispatchRound& round) {
    auto& facts = round.facts;
    facts.remainder = facts.padded_size = known_batch_size(type_, round.batch);
    if (!type_.holds_tensors_only || (comm::is_alone(nullptr) && rules_.num_parts == 1)) return;
    auto leaves = type_.flatten(round.batch);
    check_leaves(leaves, rules_);
    for (auto& leaf : leaves.tensors) leaf = leaf.contiguous();
    const auto size = type_.batch_size(round.batch);
    if (at_start_ && first_.empty()) first_ = first_rows(leaves.tensors, rules_.num_parts);
    const auto missing = (rules_.num_parts - size % rules_.num_parts) % rules_.num_parts;
    const bool fills = (facts.last && !rules_.drop_last) || size < rules_.num_parts;
    if (fills && missing > 0) {
      if (first_.empty() && facts.last) first_ = read_first();
      leaves.tensors = fill_up(leaves.tensors, first_.empty() ? leaves.tensors : first_, missing);
      facts.padded_size += missing;
    }
    type_.set_leaves(round.batch, leaves.tensors);
  }

  /// The first samples of the pass, which fill up the last round. A dataset that is read from start
  /// to end is at its end by now.
  std::vector<at::Tensor> read_first() const {
    const auto pass = reopen_();
    std::vector<AnyBatch> batches;
    for (std::int64_t rows = 0; rows < rules_.num_parts;) {
      auto loaded = pass->next();
      if (!loaded) break;
      rows += type_.batch_size(loaded->batch);
      batches.push_back(std::move(loaded->batch));
    }
    if (batches.empty()) return {};
    return first_rows(type_.leaves(joined(std::move(batches))), rules_.num_parts);
  }

  std::unique_ptr<Pass> pass_;
  const BatchType& type_;
  RoundRules rules_;
  bool at_start_;
  std::function<std::unique_ptr<Pass>()> reopen_;
  std::optional<Parts> ahead_ = std::nullopt;
  std::vector<at::Tensor> first_ = {};  // the first rows of the pass
};

// ---- what process 0 tells the others ------------------------------------------------------------

/// Name of dispatcher collectives in error reports.
inline constexpr std::string_view kDispatcherName = "DataLoaderDispatcher";

struct RoundMessage {
  enum class Kind : std::uint8_t { kRound, kEnd, kFailure };
  Kind kind = Kind::kEnd;
  /// As in `DispatchRound`. The dataset state is not sent: it stays on process 0.
  BatchFacts facts = {};
  /// Unset: as in the round before.
  std::optional<std::string> structure = std::nullopt;
  // Of a `DataLoaderError`:
  std::string failure = {};
  std::int64_t failed_batch = 0;
  std::vector<std::int64_t> failed_indices = {};
  std::optional<std::int64_t> failed_sample = std::nullopt;
};

/// Collective. Gives every process the values of process 0.
template <class... Values>
void take_over(Values&... values) {
  std::tuple<Values...> sent{values...};
  const auto named = name_collectives(kDispatcherName);
  broadcast_object_list(sent);
  std::tie(values...) = std::move(sent);
}

/// Collective. Returns the message of process 0.
RoundMessage announce(RoundMessage message) {
  auto& facts = message.facts;
  take_over(message.kind, facts.last, facts.remainder, facts.padded_size, facts.samples_after,
            facts.batches_after, message.structure, message.failure, message.failed_batch,
            message.failed_indices, message.failed_sample);
  return message;
}

RoundMessage failure_message(const std::exception_ptr& failure) {
  RoundMessage message;
  message.kind = RoundMessage::Kind::kFailure;
  try {
    std::rethrow_exception(failure);
  } catch (const DataLoaderError& error) {
    message.failure = error.what();
    message.failed_batch = error.batch();
    message.failed_indices = error.indices();
    message.failed_sample = error.sample();
  } catch (const c10::Error& error) {
    message.failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message.failure = error.what();
  } catch (...) {
    message.failure = "an exception of an unknown type";
  }
  return message;
}

/// Throws `DataLoaderError` with the text of process 0.
void throw_if_failed(const RoundMessage& message) {
  if (message.kind != RoundMessage::Kind::kFailure) return;
  throw DataLoaderError(message.failure, message.failed_batch, message.failed_indices,
                        message.failed_sample);
}

/// Collective. Runs `begin` on process 0 and gives all processes the start that it leaves there.
/// What it throws is thrown by all.
void share_start(PassStart& start, const std::function<void()>& begin) {
  std::exception_ptr failure;
  RoundMessage message;
  message.kind = RoundMessage::Kind::kRound;
  if (comm::rank_in(nullptr) == 0) {
    try {
      begin();
    } catch (...) {
      failure = std::current_exception();
      message = failure_message(failure);
    }
  }
  auto& from = start.from;
  take_over(message.kind, message.failure, message.failed_batch, message.failed_indices,
            message.failed_sample, start.epoch, start.base_seed, from.samples, from.batches,
            from.generator_state, start.skip, start.first_sequence);
  if (failure) std::rethrow_exception(failure);
  throw_if_failed(message);
}

/// A batch without its tensors, and their shapes and types.
struct BatchDescription {
  Value skeleton = {};
  std::vector<std::vector<std::int64_t>> shapes = {};
  std::vector<std::int64_t> dtypes = {};
};

std::string encode_structure(const Value& skeleton, const std::vector<at::Tensor>& leaves) {
  BatchDescription description;
  for (const auto& leaf : leaves) {
    description.shapes.push_back(leaf.sizes().vec());
    description.dtypes.push_back(static_cast<std::int64_t>(leaf.scalar_type()));
  }
  return comm::encode_object(std::tie(skeleton, description.shapes, description.dtypes));
}

BatchDescription decode_structure(const std::string& bytes) {
  using Sent = std::tuple<Value, std::vector<std::vector<std::int64_t>>, std::vector<std::int64_t>>;
  auto [skeleton, shapes, dtypes] = comm::decode_object<Sent>(bytes);
  return {std::move(skeleton), std::move(shapes), std::move(dtypes)};
}

std::vector<at::Tensor> empty_leaves(const BatchDescription& like, at::Device device) {
  std::vector<at::Tensor> leaves;
  for (std::size_t i = 0; i < like.shapes.size(); ++i) {
    const auto dtype = static_cast<at::ScalarType>(like.dtypes[i]);
    leaves.push_back(at::empty(like.shapes[i], at::TensorOptions(dtype).device(device)));
  }
  return leaves;
}

// ---- the pass of every process ------------------------------------------------------------------

class DispatchPass final : public Pass {
 public:
  DispatchPass(std::unique_ptr<RoundReader> reader, const BatchType& type,
               const Preparation& preparation, AnySlice slice, std::int64_t first_sequence)
      : reader_(std::move(reader)),
        type_(type),
        preparation_(preparation),
        slice_(std::move(slice)),
        sequence_(first_sequence) {}

  std::optional<LoadedBatch> next() override {
    if (over_) return std::nullopt;
    over_ = true;  // if it throws
    AnyBatch round;
    std::exception_ptr failure;
    RoundMessage message;
    if (reader_) {
      try {
        if (auto read = reader_->next()) {
          message = describe(*read);
          round = std::move(read->batch);
        }
      } catch (...) {
        failure = std::current_exception();
        message = failure_message(failure);
      }
    }
    message = announce(std::move(message));
    if (failure) std::rethrow_exception(failure);
    throw_if_failed(message);
    if (message.kind == RoundMessage::Kind::kEnd) return std::nullopt;
    over_ = message.facts.last;
    auto batch = delivered(std::move(round), message);
    if (!message.facts.last) message.facts.remainder = message.facts.padded_size = -1;
    return LoadedBatch{std::move(batch), std::move(message.facts), sequence_++};
  }

 private:
  RoundMessage describe(const DispatchRound& round) {
    RoundMessage message;
    message.kind = RoundMessage::Kind::kRound;
    message.facts = round.facts;
    if (!type_.holds_tensors_only || comm::is_alone(nullptr)) return message;
    auto structure = encode_structure(type_.skeleton(round.batch), type_.leaves(round.batch));
    if (structure != structure_) message.structure = structure_ = std::move(structure);
    return message;
  }

  /// The part of this process. On a device its copy may still be under way.
  AnyBatch delivered(AnyBatch round, const RoundMessage& message) {
    const auto deliver = [&] { return part_of(received(std::move(round), message), message); };
    if (!CopyStream::leads_to(*preparation_.device)) return deliver();
    const auto on_stream = CopyStream::to(*preparation_.device).enter();
    return deliver();
  }

  /// The whole round, on every process. `round` is empty where another process has read it.
  AnyBatch received(AnyBatch round, const RoundMessage& message) {
    if (!round) {
      round = allocated(message);
    } else if (type_.send != nullptr) {
      type_.send(round, *preparation_.device, preparation_.non_blocking);
    }
    // Other batches are refused by the reader unless this process is alone.
    if (!type_.holds_tensors_only) return round;
    const auto named = name_collectives(kDispatcherName);
    auto leaves = type_.leaves(round);
    comm::LeafCollectives::broadcast(leaves, type_.view(round), /*from_process=*/0,
                                     {nullptr, std::source_location::current()});
    type_.set_leaves(round, leaves);
    return round;
  }

  AnyBatch allocated(const RoundMessage& message) {
    if (message.structure) description_ = decode_structure(*message.structure);
    auto batch = type_.from_skeleton(description_.skeleton);
    type_.set_leaves(batch, empty_leaves(description_, *preparation_.device));
    return batch;
  }

  AnyBatch part_of(AnyBatch round, const RoundMessage& message) const {
    const auto processes = preparation_.num_processes;
    if (!type_.holds_tensors_only || (processes == 1 && !slice_)) return round;
    const auto range =
        split_range(message.facts.padded_size, processes, preparation_.process_index);
    if (slice_) {
      return slice_(round, {range.start, range.end, preparation_.process_index, processes});
    }
    auto leaves = type_.leaves(round);
    for (auto& leaf : leaves) leaf = leaf.slice(0, range.start, range.end);
    type_.set_leaves(round, leaves);
    return round;
  }

  std::unique_ptr<RoundReader> reader_;
  const BatchType& type_;
  Preparation preparation_;
  AnySlice slice_;
  std::int64_t sequence_;
  bool over_ = false;
  std::string structure_ = {};         // sent last
  BatchDescription description_ = {};  // received last
};

/// On process 0. `start` counts rounds, the reader batches of the loader.
std::unique_ptr<RoundReader> begin_reading(const DispatchSource& source, PassStart& start,
                                           const BatchType& type, const Preparation& preparation,
                                           bool equal_lengths) {
  auto inner = start;
  inner.skip *= preparation.batches_per_round();
  inner.first_sequence = inner.from.batches + inner.skip;
  auto pass = source.open(inner);
  start.base_seed = inner.base_seed;
  start.from.generator_state = inner.from.generator_state;
  return std::make_unique<RoundReader>(
      std::move(pass), type,
      RoundRules{.batches_per_round = preparation.batches_per_round(),
                 .num_parts = preparation.num_processes,
                 .drop_last = source.drop_last,
                 .equal_lengths = equal_lengths},
      inner.first_sequence == 0, [reopen = source.reopen, start] { return reopen(start); });
}

}  // namespace

std::unique_ptr<Pass> dispatched_pass(const DispatchSource& source, PassStart& start,
                                      const BatchType& type, const Preparation& preparation,
                                      AnySlice slice) {
  std::unique_ptr<RoundReader> reader;
  share_start(start, [&] { reader = begin_reading(source, start, type, preparation, !slice); });
  return std::make_unique<DispatchPass>(std::move(reader), type, preparation, std::move(slice),
                                        start.first_sequence);
}

}  // namespace accelerate::detail::data
