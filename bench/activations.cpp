// A step of a GPT whose blocks are computed again in backward, and the same without: time and
// memory. activations.py does the same with torch.utils.checkpoint.
#include <malloc.h>
#include <torch/torch.h>

#include <fstream>

#include "../examples/gpt_model.h"
#include "support.h"

namespace {

double kilobytes_of(const std::string& name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != name) {
  }
  double kilobytes = 0;
  status >> kilobytes;
  return kilobytes;
}

/// The most memory that the process has had during `f` above what it had before.
double megabytes(const std::function<void()>& f) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak is counted from here
  const double before = kilobytes_of("VmRSS:");
  f();
  return (kilobytes_of("VmHWM:") - before) * 1024 / 1e6;
}

}  // namespace

int main() {
  const accelerate::PartialState state;
  accelerate::set_seed(0);
  const examples::GptConfig config{
      .vocab = 256, .block = 256, .layers = 8, .heads = 4, .width = 256};
  examples::Gpt plain(config), again(config);
  (void)accelerate::apply_activation_checkpointing(*again, [](const torch::nn::Module& module) {
    return accelerate::module_class_name(module) == "GptBlock";
  });
  const auto step = [&](examples::Gpt& net, std::int64_t batch) {
    const auto ids = torch::randint(config.vocab, {batch, config.block + 1});
    const auto scores = net(ids.slice(1, 0, config.block));
    torch::nn::functional::cross_entropy(scores.flatten(0, 1), ids.slice(1, 1).flatten())
        .backward();
  };
  // Large tensors go back to the system at once: the memory is theirs, not what malloc keeps.
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  for (auto* net : {&plain, &again}) step(*net, 8);  // gradients are there from now on
  bench::report("checkpointed: memory of a step", megabytes([&] { step(again, 8); }), "MB");
  bench::report("plain: memory of a step", megabytes([&] { step(plain, 8); }), "MB");

  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // what malloc comes to by itself
  const auto times =
      bench::in_turns({[&] { step(again, 8); }, [&] { step(plain, 8); }}, 3, 500'000);
  bench::report("checkpointed: step", bench::median(times[0]) / 1e3, "ms");
  bench::report("plain: step", bench::median(times[1]) / 1e3, "ms");

  const auto weight = torch::ones({8}, torch::requires_grad());
  const auto small = [weight](const torch::Tensor& x) { return (x * weight).sin(); };
  const auto input = torch::ones({8});
  const auto each =
      bench::in_turns({[&] { accelerate::activation_checkpoint(small, input).sum().backward(); },
                       [&] { small(input).sum().backward(); }});
  bench::report("checkpoint of a small function, added",
                bench::median(each[0]) - bench::median(each[1]), "us");
}
