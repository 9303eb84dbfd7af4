// Ulysses: attention by heads, and batches of which each process has a part of the sequence.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "model_parallel/sequence_messages.h"
#include "model_parallel/whole_attention.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate::sequence_parallel_test {
namespace {

using test::AttentionCase;
using test::has;
using test::message_of;
using test::WholeAttention;
using Batch = std::map<std::string, torch::Tensor>;

/// The consecutive part of this process.
torch::Tensor part_of(const torch::Tensor& tensor, std::int64_t dim,
                      const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto share = tensor.size(dim) / group->getSize();
  return tensor.narrow(dim, group->getRank() * share, share).contiguous();
}

void expect_that_of_one_process(PartialState& state) {
  const auto group = state.process_group();
  for (const auto& one : std::vector<AttentionCase>{
           {.causal = true},
           {.causal = false},
           {.causal = true, .heads = 8, .key_heads = 4},
           {.causal = true, .heads = 8, .key_heads = 2},
           {.causal = false, .heads = 4, .key_heads = 1},
           {.causal = true, .value_width = 6},
           {.causal = true, .heads = 8, .key_heads = 1, .dtype = torch::kFloat}}) {
    const WholeAttention whole(one);
    const auto error = test::error_of(
        whole, [&](const auto& tensor) { return part_of(tensor, 2, group); },
        [&](const auto& query, const auto& key, const auto& value) {
          return ulysses_attention(
              query, key, value,
              {.is_causal = one.causal, .enable_gqa = one.heads != one.key_heads, .group = group});
        });
    EXPECT_LT(error, one.dtype == torch::kDouble ? 1e-12 : 1e-5) << shown(one);
  }
}

TEST(UlyssesAttention, IsThatOfOneProcessOnTwo) {
  on_processes(2, [](PartialState& state) { expect_that_of_one_process(state); });
}

TEST(UlyssesAttention, IsThatOfOneProcessOnFour) {
  on_processes(4, [](PartialState& state) { expect_that_of_one_process(state); });
}

TEST(UlyssesAttention, SendsAllButTheHeadsOfItsOwn) {
  on_processes(4, [](PartialState& state) {
    const auto part = torch::randn({1, 4, 8, 4}).requires_grad_();  // 512 bytes
    const auto before = detail::model_parallel::sequence_traffic();
    const auto out = ulysses_attention(part, part, part, {.group = state.process_group()});
    const auto forward = detail::model_parallel::sequence_traffic();
    // Query, key and value in one message, the result in another: 3 of 4 parts leave.
    EXPECT_EQ(forward.all_to_all_calls - before.all_to_all_calls, 2);
    EXPECT_EQ(forward.all_to_all_bytes - before.all_to_all_bytes, 4 * 512 * 3 / 4);
    out.sum().backward();
    EXPECT_EQ(
        detail::model_parallel::sequence_traffic().all_to_all_bytes - forward.all_to_all_bytes,
        4 * 512 * 3 / 4);
  });
}

TEST(UlyssesAttention, RefusesHeadsThatProcessesCannotShare) {
  on_processes(4, [](PartialState& state) {
    const auto attend = [&](std::int64_t heads, std::int64_t key_heads) {
      return message_of<ArgumentError>([&] {
        const auto key = torch::randn({1, key_heads, 2, 8});
        (void)ulysses_attention(torch::randn({1, heads, 2, 8}), key, key,
                                {.enable_gqa = true, .group = state.process_group()});
      });
    };
    EXPECT_TRUE(has(attend(6, 6), "6 heads of queries, which 4 processes cannot share equally"));
    EXPECT_TRUE(has(attend(12, 3), "3 heads of keys for 4 processes"));
  });
}

// ---- the loss -----------------------------------------------------------------------------------

TEST(SpWeightedLoss, CountsTokensAndNotProcesses) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const bool first = state.is_main_process();
    const auto weight = torch::ones({}, torch::requires_grad());
    // Three tokens of loss 2, one of loss 6.
    const auto labels = first ? torch::tensor({8, 9, 7}) : torch::tensor({10, -100, -100});
    const auto loss = sp_weighted_loss(weight * (first ? 2 : 6), labels, group);
    EXPECT_EQ(loss.item<float>(), 3.0F);
    loss.backward();
    // Averaged over both processes: that of the whole sequence.
    EXPECT_EQ(reduce(weight.grad(), Reduction::kMean).item<float>(), 3.0F);

    const auto other = torch::ones({}, torch::requires_grad());
    const auto empty = torch::tensor({-100, -100, -100});
    const auto mean_of_none = other * (first ? 2.0 : std::nan(""));
    const auto same = sp_weighted_loss(mean_of_none, first ? labels : empty, group);
    EXPECT_EQ(same.item<float>(), 2.0F);
    same.backward();
    EXPECT_EQ(other.grad().item<float>() == 4.0F, first) << other.grad();
  });
}

// ---- batches ------------------------------------------------------------------------------------

torch::Tensor row(std::initializer_list<std::int64_t> values) {
  return torch::tensor(std::vector<std::int64_t>(values)).unsqueeze(0);
}

Batch labelled(const torch::Tensor& labels) {
  return {{"input_ids", labels - 1},
          {"position_ids", torch::arange(labels.size(1)).expand_as(labels)},
          {"labels", labels}};
}

/// A loader that yields these batches.
DataLoader<Batch> batches_of(std::vector<Batch> batches) {
  const auto size = std::ssize(batches);
  const auto get = [batches = std::move(batches)](std::int64_t i) {
    return batches[static_cast<std::size_t>(i)];
  };
  return make_data_loader(FunctionDataset(size, get), {.batch_size = std::nullopt});
}

TEST(UlyssesBatchSharder, YieldsThePartsOfTheBatchesOfAllProcesses) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const bool first = state.is_main_process();
    // Each process reads batches of its own, also of other lengths.
    const auto own = first ? labelled(row({7, 8, 9, 10})) : labelled(row({1, 2, 3, 4, 5, 6}));
    const UlyssesBatchSharder<Batch> sharder(batches_of({own, own}), {.group = group});
    EXPECT_EQ(sharder.size(), 4);
    std::vector<Batch> seen;
    for (const auto& batch : sharder) {
      EXPECT_FALSE(batch.contains("labels"));
      seen.push_back(batch);
      EXPECT_EQ(sharder.end_of_dataloader(), seen.size() == 4);
    }
    ASSERT_EQ(seen.size(), 4U);
    EXPECT_TRUE(seen[0].at("shift_labels").equal(first ? row({8, 9}) : row({10, -100})));
    EXPECT_TRUE(seen[0].at("position_ids").equal(first ? row({0, 1}) : row({2, 3})));
    EXPECT_TRUE(seen[1].at("input_ids").equal(first ? row({0, 1, 2}) : row({3, 4, 5})));
    EXPECT_TRUE(seen[1].at("shift_labels").equal(first ? row({2, 3, 4}) : row({5, 6, -100})));
    EXPECT_TRUE(seen[2].at("input_ids").equal(seen[0].at("input_ids")));

    // A state saved in the middle of a refill goes on with its first part.
    DataLoaderState in_between;
    int given = 0;
    for (const auto& batch : sharder) {
      (void)batch;
      in_between = sharder.state_dict();
      if (++given == 3) break;
    }
    UlyssesBatchSharder<Batch> resumed(batches_of({own, own}), {.group = group});
    resumed.load_state_dict(in_between);
    int rest = 0;
    for (const auto& batch : resumed) {
      (void)batch;
      ++rest;
    }
    EXPECT_EQ(rest, 2);
  });
}

struct Sentences {
  torch::Tensor input_ids, position_ids, labels, shift_labels;
};
constexpr auto tensor_tree_fields(std::type_identity<Sentences>) {
  return ACCELERATE_FIELDS(Sentences, input_ids, position_ids, labels, shift_labels);
}
struct NoPlace {
  torch::Tensor input_ids, position_ids, labels;
};
constexpr auto tensor_tree_fields(std::type_identity<NoPlace>) {
  return ACCELERATE_FIELDS(NoPlace, input_ids, position_ids, labels);
}

template <class T>
std::vector<T> all_of(const std::vector<T>& batches, const UlyssesBatchSharderOptions& options) {
  const auto get = [batches](std::int64_t i) { return batches[static_cast<std::size_t>(i)]; };
  const auto loader =
      make_data_loader(FunctionDataset(std::ssize(batches), get), {.batch_size = std::nullopt});
  std::vector<T> seen;
  for (const auto& batch : UlyssesBatchSharder<T>(loader, options)) seen.push_back(batch);
  return seen;
}

TEST(UlyssesBatchSharder, TakesStructsWithAPlaceForTheLabels) {
  on_processes(2, [](PartialState& state) {
    const UlyssesBatchSharderOptions options{.group = state.process_group()};
    const auto labels = row({7, 8, 9, 10});
    const auto seen = all_of<Sentences>({{labels, labels, labels, {}}}, options);
    ASSERT_EQ(seen.size(), 2U);
    EXPECT_FALSE(seen[0].labels.defined());
    EXPECT_TRUE(
        seen[0].shift_labels.equal(state.is_main_process() ? row({8, 9}) : row({10, -100})));
    EXPECT_TRUE(has(message_of<ArgumentError>(
                        [&] { (void)all_of<NoPlace>({{labels, labels, labels}}, options); }),
                    "has no field shift_labels"));
    EXPECT_TRUE(
        has(message_of<ArgumentError>([&] { (void)all_of<torch::Tensor>({labels}, options); }),
            "the tensors of these batches have no names"));
  });
}

TEST(UlyssesBatchSharder, NamesWhatIsWrongWithABatch) {
  on_processes(2, [](PartialState& state) {
    const auto message = [&](Batch batch, std::optional<std::int64_t> length = std::nullopt) {
      return message_of<ArgumentError>([&] {
        (void)all_of<Batch>({std::move(batch)},
                            {.group = state.process_group(), .seq_length = length});
      });
    };
    auto batch = labelled(row({1, 2, 3, 4}));
    EXPECT_TRUE(has(message(batch, 8), "length 4, but sp_seq_length is 8"));
    auto none = batch;
    none.erase("position_ids");
    EXPECT_TRUE(has(message(none), "the batch of rank 0 has no position_ids"));
    none.erase("input_ids");
    EXPECT_TRUE(has(message(none), "has no input_ids of two dimensions"));
    batch["attention_mask"] = torch::ones({1, 3});
    EXPECT_TRUE(has(message(batch),
                    "attention_mask of the batch of rank 0 has shape [1, 3], but "
                    "dimension 1 must be 4"));
    EXPECT_TRUE(has(message(labelled(row({1, 2, 3}))), "length 3, which 2 processes cannot share"));
  });
}

}  // namespace
}  // namespace accelerate::sequence_parallel_test
