// Any text is read as the description of a weight in 4 bits or refused with a FormatError, what is
// read is written back as it was, and tensors of other sizes than it asks for are refused.
#include <string>

#include "accelerate/errors.h"
#include "formats/quant_state.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::formats;
  QuantStateText state;
  try {
    state = parse_quant_state(fuzz::text(data, size), "fc.weight");
  } catch (const FormatError&) {
    return 0;
  }
  fuzz::check(state.shape.size() == 2, "a weight is a matrix");
  fuzz::check(state.blocksize >= 32 && state.blocksize <= 4096,
              "blocks are of a size that kernels take");
  const auto text = write_quant_state(state);
  fuzz::check(parse_quant_state(text, "fc.weight") == state, "reading gives back what was written");

  const auto values = state.shape[0] * state.shape[1];
  const auto blocks = (values + state.blocksize - 1) / state.blocksize;
  QuantTensors tensors{{"", {"uint8", {(values + 1) / 2, 1}}},
                       {"absmax", {state.nested ? "uint8" : "float32", {blocks}}},
                       {"quant_map", {"float32", {16}}},
                       {std::string(kQuantStateName) + state.quant_type, {"uint8", {1}}}};
  if (state.nested) {
    const auto size2 = state.nested->blocksize;
    tensors["nested_absmax"] = {"float32", {(blocks + size2 - 1) / size2}};
    tensors["nested_quant_map"] = {"float32", {256}};
  }
  check_quant_tensors(state, tensors, "fc.weight");
  tensors["absmax"].shape = {blocks + 1};
  try {
    check_quant_tensors(state, tensors, "fc.weight");
    fuzz::check(false, "one scale too many is refused");
  } catch (const FormatError&) {
  }
  return 0;
}
