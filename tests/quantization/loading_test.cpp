// What load_and_quantize_model makes of files and options, and packed weights beside parameters of
// other dtypes.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "core/captured_log.h"
#include "core/text.h"
#include "examples/gpt_model.h"
#include "quantization/nets.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::Adapted;
using test::CapturedLog;
using test::eight_bits;
using test::four_bits;
using test::has;
using test::ids;
using test::message_of;
using test::Net;
using test::OneLayer;
using test::reference;
using test::seeded_net;

struct Loading : testing::Test {
  test::Folder folder;
};

// -- files ----------------------------------------------------------------------------------------

TEST_F(Loading, CodesAreNoValuesOfLayersThatAreNotQuantized) {
  for (const auto& kind : {four_bits(), eight_bits()}) {
    auto config = kind;
    config.skip_modules.emplace();
    auto quantized = seeded_net();
    static_cast<void>(load_and_quantize_model(quantized, config));
    const auto state = state_dict(*quantized);
    const auto path = folder.path() / (config.load_in_4bit ? "four" : "eight");
    save_model(state, path);
    const std::string expected = detail::str("is quantized to ", config.load_in_4bit ? 4 : 8,
                                             " bits in the file, and the model keeps it in ");
    // The head is skipped by default.
    auto empty = init_empty_weights([] { return Net(); });
    EXPECT_TRUE(has(message_of<FormatError>([&] {
                      static_cast<void>(
                          load_and_quantize_model(empty, kind, {.weights_location = path}));
                    }),
                    "'head.weight' " + expected + "float32"));
    auto plain = seeded_net();
    EXPECT_TRUE(has(message_of<FormatError>([&] { load_checkpoint_in_model(*plain, path); }),
                    "'first.weight' " + expected));
    EXPECT_TRUE(has(message_of<FormatError>([&] { load_state_dict(*plain, state, false); }),
                    "'first.weight' " + expected));
    EXPECT_TRUE(torch::equal(plain->forward(ids()), seeded_net()->forward(ids())));
  }
}

}  // namespace
}  // namespace accelerate
