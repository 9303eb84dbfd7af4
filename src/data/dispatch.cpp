#include <ATen/Functions.h>

#include <algorithm>
#include <tuple>

#include "accelerate/dispatch_messages.h"
#include "accelerate/dispatch_rounds.h"
#include "accelerate/errors.h"
#include "accelerate/name_collectives.h"
#include "accelerate/object_operations.h"
#include "core/text.h"

namespace accelerate::detail {

RoundMessage announce(RoundMessage message) {
  auto fields =
      std::tie(message.kind, message.last, message.genuine, message.padded, message.samples_after,
               message.batches_after, message.structure, message.failure, message.failed_batch,
               message.failed_indices, message.failed_sample);
  std::tuple<RoundMessage::Kind, bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
             std::optional<std::string>, std::string, std::int64_t, std::vector<std::int64_t>,
             std::optional<std::int64_t>>
      sent = fields;
  const auto named = name_collectives(kDispatcherName);
  broadcast_object_list(sent);
  fields = std::move(sent);
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

void throw_if_failed(const RoundMessage& message) {
  if (message.kind != RoundMessage::Kind::kFailure) return;
  throw DataLoaderError(message.failure, message.failed_batch, message.failed_indices,
                        message.failed_sample);
}

void share_start(PassStart& start, const std::function<void()>& begin) {
  std::exception_ptr failure;
  RoundMessage message;
  message.kind = RoundMessage::Kind::kRound;
  if (rank_in(nullptr) == 0) {
    try {
      begin();
    } catch (...) {
      failure = std::current_exception();
      message = failure_message(failure);
    }
  }
  auto& position = start.from;
  std::tuple sent{message.kind,
                  message.failure,
                  message.failed_batch,
                  message.failed_indices,
                  start.epoch,
                  start.base_seed,
                  position.samples,
                  position.batches,
                  position.generator_state,
                  start.skip,
                  start.first_sequence};
  const auto named = name_collectives(kDispatcherName);
  broadcast_object_list(sent);
  std::tie(message.kind, message.failure, message.failed_batch, message.failed_indices, start.epoch,
           start.base_seed, position.samples, position.batches, position.generator_state,
           start.skip, start.first_sequence) = std::move(sent);
  if (failure) std::rethrow_exception(failure);
  throw_if_failed(message);
}

std::string encode_structure(const Value& skeleton, const std::vector<at::Tensor>& leaves) {
  BatchDescription description;
  for (const auto& leaf : leaves) {
    description.shapes.push_back(leaf.sizes().vec());
    description.dtypes.push_back(static_cast<std::int64_t>(leaf.scalar_type()));
  }
  return encode_object(std::tie(skeleton, description.shapes, description.dtypes));
}

BatchDescription decode_structure(const std::string& bytes) {
  using Sent = std::tuple<Value, std::vector<std::vector<std::int64_t>>, std::vector<std::int64_t>>;
  auto [skeleton, shapes, dtypes] = decode_object<Sent>(bytes);
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

SplitRange part_range(const RoundMessage& round, const Preparation& how) {
  return split_range(round.padded, how.num_processes, how.process_index);
}

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

std::vector<at::Tensor> first_rows(std::vector<at::Tensor> leaves, std::int64_t count) {
  for (auto& leaf : leaves) {
    // A copy: a view would keep the whole round.
    leaf = leaf.narrow(0, 0, std::min(count, leaf.size(0))).clone();
  }
  return leaves;
}

void refuse_concatenation() {
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

}  // namespace accelerate::detail
