// Attention over a sequence that processes share, and the scope that cuts tensors.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "model_parallel/context_parallel.h"
#include "model_parallel/sequence_messages.h"
#include "model_parallel/whole_attention.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using detail::model_parallel::enter_context_parallel;
using test::AttentionCase;
using test::has;
using test::message_of;
using test::WholeAttention;

const std::vector<AttentionCase>& cases() {
  static const std::vector<AttentionCase> all{
      {.causal = true},
      {.causal = false},
      {.causal = true, .heads = 6, .key_heads = 2},
      {.causal = false, .heads = 6, .key_heads = 2},
      {.causal = true, .dtype = torch::kFloat},
      {.causal = true, .heads = 4, .key_heads = 1, .dtype = torch::kFloat},
      {.causal = true, .dtype = torch::kBFloat16},
      {.causal = true, .value_width = 6},  // no fused kernel
      {.causal = false, .heads = 4, .key_heads = 2, .dtype = torch::kFloat, .value_width = 6},
  };
  return all;
}

double tolerance(torch::Dtype dtype) {
  if (dtype == torch::kDouble) return 1e-12;
  return dtype == torch::kFloat ? 1e-5 : 0.1;
}

void expect_that_of_one_process(PartialState& state) {
  const auto group = state.process_group();
  for (const auto& one : cases()) {
    const WholeAttention whole(one);
    for (const std::string strategy : {"allgather", "alltoall"}) {
      const auto error = test::error_of(
          whole, [&](const auto& tensor) { return context_parallel_shard(tensor, 2, group); },
          [&](const auto& query, const auto& key, const auto& value) {
            return context_parallel_attention(query, key, value,
                                              {.is_causal = one.causal,
                                               .enable_gqa = one.heads != one.key_heads,
                                               .cp_comm_strategy = strategy,
                                               .group = group});
          });
      EXPECT_LT(error, tolerance(one.dtype)) << shown(one) << ", " << strategy;
    }
  }
}

TEST(ContextParallelAttention, IsThatOfOneProcessOnTwo) {
  on_processes(2, [](PartialState& state) { expect_that_of_one_process(state); });
}

TEST(ContextParallelAttention, IsThatOfOneProcessOnFour) {
  on_processes(4, [](PartialState& state) { expect_that_of_one_process(state); });
}

TEST(ContextParallelAttention, SendsAsManyBytesAsItsStrategySays) {
  on_processes(4, [](PartialState& state) {
    const auto group = state.process_group();
    const auto part = torch::randn({1, 2, 8, 4});  // 256 bytes: keys and values have 512
    for (const bool gathers : {true, false}) {
      const auto query = part.clone().requires_grad_();
      const auto before = detail::model_parallel::sequence_traffic();
      const auto out = context_parallel_attention(
          query, part, part,
          {.cp_comm_strategy = gathers ? "allgather" : "alltoall", .group = group});
      const auto forward = detail::model_parallel::sequence_traffic();
      EXPECT_EQ(forward.all_gather_bytes - before.all_gather_bytes, gathers ? 3 * 512 : 0);
      EXPECT_EQ(forward.all_to_all_bytes - before.all_to_all_bytes, gathers ? 0 : 3 * 512);
      out.sum().backward();
      // Keys and values once more, and their gradients all the way around.
      const auto after = detail::model_parallel::sequence_traffic();
      EXPECT_EQ(after.all_gather_bytes - forward.all_gather_bytes, gathers ? 3 * 512 : 0);
      EXPECT_EQ(after.all_to_all_bytes - forward.all_to_all_bytes, (gathers ? 4 : 7) * 512);
    }
  });
}

TEST(ContextParallelAttention, RefusesWhatItCannotCompute) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto four = torch::randn({1, 2, 4, 8});
    const auto attend = [&](const torch::Tensor& query, const torch::Tensor& key,
                            ContextParallelAttentionOptions options) {
      options.group = group;
      return message_of<ArgumentError>(
          [&] { (void)context_parallel_attention(query, key, key, options); });
    };
    EXPECT_TRUE(has(attend(torch::randn({1, 4, 4, 8}), four, {}), "Set enable_gqa"));
    EXPECT_TRUE(has(attend(torch::randn({1, 2, 6, 8}), four, {.is_causal = true}),
                    "as many queries as keys"));
    const auto three = torch::randn({1, 2, 3, 8});
    EXPECT_TRUE(has(attend(three, three, {.is_causal = true}), "two chunks of equal length"));
    EXPECT_TRUE(has(attend(torch::randn({4, 8}), four, {}), "four dimensions"));
    EXPECT_TRUE(has(attend(four.to(torch::kDouble), four, {}), "They must have one type"));
    EXPECT_TRUE(has(attend(four, four, {.cp_comm_strategy = "ring"}), "allgather, alltoall"));
    EXPECT_TRUE(
        has(message_of<StateError>([&] { (void)context_parallel_attention(four, four, four); }),
            "Set cp_size of the parallelism_config"));
  });
}

TEST(ContextParallelShard, HasTheHeadAndTheTail) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto whole = torch::arange(8).view({1, 8});
    const auto part = context_parallel_shard(whole, 1, group);
    const std::vector<std::int64_t> first{0, 1, 6, 7}, second{2, 3, 4, 5};
    EXPECT_TRUE(part.equal(torch::tensor(state.is_main_process() ? first : second).view({1, 4})));
    EXPECT_TRUE(context_parallel_unshard(part, 1, group).equal(whole));
    EXPECT_TRUE(context_parallel_unshard(context_parallel_shard(whole.t(), 0, group), -2, group)
                    .equal(whole.t()));
  });
}

// ---- the scope ----------------------------------------------------------------------------------

TEST(ContextParallelScope, CutsBuffersInPlaceAndRestoresThemOnEveryWayOut) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto ids = torch::arange(16).view({2, 8});
    const auto table = torch::arange(8);
    const auto kept = torch::arange(8);
    const auto other_handle = ids;
    const auto* const bytes = ids.const_data_ptr();
    {
      const auto scope =
          enter_context_parallel({{ids, table, kept}, {1, 0, 0}, {kept}}, group, "allgather");
      EXPECT_EQ(other_handle.sizes(), (torch::IntArrayRef{2, 4})) << "the tensor, not a copy";
      EXPECT_EQ(table.size(0), 4);
    }
    EXPECT_EQ(ids.const_data_ptr(), bytes) << "nothing was copied";
    EXPECT_TRUE(other_handle.equal(torch::arange(16).view({2, 8})));
    EXPECT_TRUE(table.equal(torch::arange(8)));
    EXPECT_EQ(kept.size(0), 4);

    EXPECT_THROW(
        {
          const auto scope = enter_context_parallel({{ids}, {1}, {}}, group, "allgather");
          throw std::runtime_error("out of the middle of a step");
        },
        std::runtime_error);
    EXPECT_TRUE(ids.equal(torch::arange(16).view({2, 8})));
    const auto q = torch::randn({1, 1, 2, 4});
    const auto before = detail::model_parallel::sequence_traffic();
    (void)at::scaled_dot_product_attention(q, q, q);
    EXPECT_EQ(detail::model_parallel::sequence_traffic().all_gather_calls, before.all_gather_calls)
        << "attention is as usual again";
  });
}

TEST(ContextParallelScope, NamesTheBufferThatCannotBeCut) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const auto ids = torch::arange(8).view({1, 8});
    const auto message = [&](const detail::model_parallel::SequenceBuffers& buffers) {
      return message_of<ArgumentError>(
          [&] { (void)enter_context_parallel(buffers, group, "allgather"); });
    };
    EXPECT_TRUE(has(message({{ids}, {}, {}}), "1 buffers, but 0 buffer_seq_dims"));
    EXPECT_TRUE(has(message({{ids, torch::arange(6)}, {1, 0}, {}}),
                    "buffer 1 of shape [6] has length 6 in dimension 0, which must be a multiple "
                    "of 4"));
    EXPECT_TRUE(has(message({{ids}, {2}, {}}), "buffer 0 of shape [1, 8] has no dimension 2"));
    EXPECT_TRUE(has(message({{ids, ids}, {1, 1}, {}}), "buffer 0 is given twice"));
    EXPECT_TRUE(has(message({{torch::ones({8}, torch::requires_grad())}, {0}, {}}),
                    "buffer 0 requires grad"));
    EXPECT_TRUE(has(message({{ids}, {1}, {torch::arange(8)}}), "not among the buffers"));
    EXPECT_EQ(ids.size(1), 8) << "nothing has changed";
  });
}

TEST(ContextParallelScope, ComputesAttentionOfCodeThatDoesNotKnowOfIt) {
  on_processes(2, [](PartialState& state) {
    const auto group = state.process_group();
    const AttentionCase causal{.heads = 4, .key_heads = 2};
    const WholeAttention whole(causal);
    const auto cut = [&](const torch::Tensor& tensor) {
      return context_parallel_shard(tensor, 2, group);
    };
    const auto mask = torch::ones({16, 16}, torch::kBool).tril();
    const auto added =
        torch::zeros({16, 16}, torch::kDouble).masked_fill(mask.logical_not(), -INFINITY);
    const auto plain = [](const auto& q, const auto& k, const auto& v) {
      return at::scaled_dot_product_attention(q, k, v, {}, 0.0, true, {}, true);
    };
    const auto checkpointed = [&](const auto& q, const auto& k, const auto& v) {
      return activation_checkpoint(plain, q, k, v);
    };
    const auto masked = [&](const auto& q, const auto& k, const auto& v) {
      return at::scaled_dot_product_attention(q, k, v, mask, 0.0, false, {}, true);
    };
    const auto with_added = [&](const auto& q, const auto& k, const auto& v) {
      return at::scaled_dot_product_attention(q, k, v, added, 0.0, false, {}, true);
    };
    for (const std::string strategy : {"allgather", "alltoall"}) {
      const auto scope = enter_context_parallel({}, group, strategy);
      EXPECT_LT(test::error_of(whole, cut, plain), 1e-12);
      EXPECT_LT(test::error_of(whole, cut, checkpointed), 1e-12) << "backward computes it again";
      EXPECT_LT(test::error_of(whole, cut, masked), 1e-12);
      EXPECT_LT(test::error_of(whole, cut, with_added), 1e-12);
    }
  });
}

TEST(ContextParallelScope, RefusesMasksThatAreNotCausalAndDropout) {
  on_processes(2, [](PartialState& state) {
    const auto scope = enter_context_parallel({}, state.process_group(), "allgather");
    const auto part = torch::randn({2, 2, 4, 8});
    const auto padding = torch::ones({2, 1, 1, 4}, torch::kBool);
    const auto message = [&](const torch::Tensor& mask) {
      return message_of<ArgumentError>(
          [&] { (void)at::scaled_dot_product_attention(part, part, part, mask); });
    };
    EXPECT_NO_THROW((void)at::scaled_dot_product_attention(part, part, part, padding))
        << "it hides nothing";
    padding[1][0][0][3] = false;
    EXPECT_TRUE(has(message(padding), "attn_mask [2, 1, 1, 4] is neither empty nor causal"));
    EXPECT_TRUE(has(message(torch::randn({4, 4})), "leave padding out of the loss"));
    EXPECT_TRUE(has(message(torch::ones({4, 4}, torch::kBool).triu()), "nor causal"));
    EXPECT_TRUE(has(message_of<UnsupportedError>(
                        [&] { (void)at::scaled_dot_product_attention(part, part, part, {}, 0.1); }),
                    "dropout_p is 0.1"));
  });
}

TEST(ContextParallelScope, CastsAsAutocastDoes) {
  on_processes(2, [](PartialState& state) {
    const auto scope = enter_context_parallel({}, state.process_group(), "alltoall");
    const auto part = torch::randn({1, 2, 4, 8});
    const AutocastScope autocast(torch::kCPU, torch::kBFloat16, {});
    const auto out = at::scaled_dot_product_attention(part, part, part, {}, 0.0, true);
    EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
  });
}

TEST(ContextParallelScope, BackwardAfterItsEndIsAnErrorAndNotAWrongGradient) {
  on_processes(2, [](PartialState& state) {
    const auto ids = torch::arange(8);
    const auto table = torch::randn({8, 4}, torch::requires_grad());
    torch::Tensor loss;
    {
      const auto scope =
          enter_context_parallel({{ids}, {0}, {}}, state.process_group(), "allgather");
      loss = torch::embedding(table, ids).sum();
    }
    EXPECT_TRUE(
        has(message_of<c10::Error>([&] { loss.backward(); }), "modified by an inplace operation"));
  });
}

}  // namespace
}  // namespace accelerate
