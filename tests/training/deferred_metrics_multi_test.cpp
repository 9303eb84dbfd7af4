#include "accelerate/deferred_metrics.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

TEST(DeferredMetrics, ReduceGivesMeansOverAllProcesses) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    DeferredMetrics metrics;
    // Process 1 sees three values where process 0 sees one, and meets the names the other way.
    if (rank == 0) {
      metrics.add("loss", torch::tensor(1.0));
      metrics.add("accuracy", torch::tensor(0.5), 10);
    } else {
      metrics.add("accuracy", torch::tensor(1.0), 30);
      for (int i = 0; i < 3; ++i) metrics.add("loss", torch::tensor(5.0));
    }
    const auto means = metrics.reduce();
    EXPECT_EQ(means, (Value::Dict{{"loss", 4.0}, {"accuracy", 0.875}}));
    EXPECT_EQ(means.keys().front().as_string(), "loss") << "the order of process 0";
    EXPECT_TRUE(metrics.reduce().empty());

    // A name that is known may have values on one process alone.
    if (rank == 1) metrics.add("loss", torch::tensor(2.0));
    EXPECT_EQ(metrics.reduce(), (Value::Dict{{"loss", 2.0}}));

    EXPECT_TRUE(DeferredMetrics().reduce().empty());
  });
}

TEST(DeferredMetrics, ReduceTakesMoreThanOneMessageHolds) {
  on_processes(2, [](PartialState& state) {
    DeferredMetrics metrics;
    for (int i = 0; i < 200; ++i) {
      metrics.add("a metric with a long name, number " + std::to_string(i),
                  torch::tensor(i + state.process_index()));
    }
    const auto means = metrics.reduce();
    ASSERT_EQ(means.size(), 200);
    EXPECT_EQ(means.at("a metric with a long name, number 199"), Value(199.5));
  });
}

TEST(DeferredMetrics, ReduceNamesTheProcessThatLacksAName) {
  for (const int without : {0, 1}) {
    on_processes(2, [without](PartialState& state) {
      DeferredMetrics metrics;
      metrics.add("loss", torch::tensor(1.0));
      if (state.process_index() != without) metrics.add("accuracy", torch::tensor(1.0));
      try {
        metrics.reduce();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const CommError& error) {
        EXPECT_EQ(error.rank(), without);
        const std::string text = error.what();
        EXPECT_NE(text.find("rank " + std::to_string(without) + " has never added to 'accuracy'"),
                  std::string::npos)
            << text;
      }
      // Nothing is lost: with weight 0 all have the name.
      metrics.add("accuracy", torch::tensor(0.0), state.process_index() == without ? 0 : 1);
      EXPECT_EQ(metrics.reduce(), (Value::Dict{{"loss", 1.0}, {"accuracy", 0.5}}));
    });
  }
}

}  // namespace
}  // namespace accelerate
