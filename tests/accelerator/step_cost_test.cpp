// What a step of a training loop costs beside its kernels: memory of the library, and waits.
#include <ATen/record_function.h>
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <link.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

#include "accelerator/nets.h"

namespace {

std::uintptr_t library_begin = 0, library_end = 0;
std::atomic<bool> counts = false;
std::atomic<std::int64_t> allocations = 0;

/// Where the code of libaccelerate.so is.
int find_library(dl_phdr_info* module, std::size_t /*size*/, void* /*unused*/) {
  if (std::string_view(module->dlpi_name).find("/libaccelerate.so") == std::string_view::npos) {
    return 0;
  }
  for (int i = 0; i < module->dlpi_phnum; ++i) {
    const auto& segment = module->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
    library_begin = module->dlpi_addr + segment.p_vaddr;
    library_end = library_begin + segment.p_memsz;
  }
  return 1;
}

}  // namespace

// Counts what the library allocates itself, not what LibTorch allocates for it.
void* operator new(std::size_t size) {
  const auto caller = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  if (counts && caller >= library_begin && caller < library_end) ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace accelerate {
namespace {

using test::anew;

/// A model, its optimizer and a schedule, and the step of a user's loop.
template <class Optimizer>
class Loop {
 public:
  template <class Options>
  Loop(const Options& options, PrecisionType precision)
      : accelerator_(anew({.mixed_precision = precision, .cpu = true})) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                              torch::nn::Linear(16, 1));
    Optimizer optimizer(net->parameters(), options);
    auto [model, prepared] = accelerator_.prepare(net, std::move(optimizer));
    const auto parameters = model.parameters();
    step_ = [this, model = model, optimizer = prepared, parameters,
             x = torch::randn({4, 8})]() mutable {
      auto accumulating = accelerator_.accumulate(model);
      const auto loss = model(x).square().mean();
      accelerator_.backward(loss);
      if (accelerator_.sync_gradients()) accelerator_.clip_grad_norm_(parameters, 0.1);
      accelerator_.clip_grad_value_(parameters, 0.05);
      optimizer.step();
      optimizer.zero_grad();
    };
  }
  /// Calls `f` before 20 steps, after some that make what lasts.
  void run(const std::function<void()>& f) {
    for (int i = 0; i < 5; ++i) step_();
    f();
    for (int i = 0; i < 20; ++i) step_();
  }

 private:
  Accelerator accelerator_;
  std::function<void()> step_;
};

class StepCost : public test::Stateless {
 protected:
  static void SetUpTestSuite() {
    dl_iterate_phdr(find_library, nullptr);
    ASSERT_LT(library_begin, library_end);
  }
};

template <class Optimizer, class Options>
std::int64_t allocations_of(const Options& options, PrecisionType precision) {
  Loop<Optimizer> loop(options, precision);
  loop.run([] {
    allocations = 0;
    counts = true;
  });
  counts = false;
  return allocations;
}

TEST_F(StepCost, NoAllocationOfTheLibrary) {
  const AdamWOptions adamw{.lr = 1e-3};
  const SGDOptions sgd{.lr = 1e-3, .momentum = 0.9};
  EXPECT_EQ(allocations_of<AdamW>(adamw, PrecisionType::kNo), 0);
  EXPECT_EQ(allocations_of<AdamW>(adamw, PrecisionType::kBf16), 0);
  EXPECT_EQ(allocations_of<SGD>(sgd, PrecisionType::kNo), 0);
  EXPECT_EQ(allocations_of<SGD>(sgd, PrecisionType::kBf16), 0);
}

TEST_F(StepCost, CountsWhatTheLibraryAllocates) {
  const Accelerator accelerator(anew({.cpu = true}));
  allocations = 0;
  counts = true;
  (void)accelerator.state();
  const auto version = Value(Value::List(100)).repr();
  counts = false;
  EXPECT_GT(allocations, 0);
}

TEST_F(StepCost, NoAllocationOfAGradScaler) {
  const auto weight = torch::ones({3}).requires_grad_();
  SGD sgd(std::vector<torch::Tensor>{weight}, {.lr = 0.1});
  GradScaler scaler;
  for (int i = 0; i < 30; ++i) {
    if (i == 10) {
      allocations = 0;
      counts = true;
    }
    scaler.scale(weight.sum()).backward();
    scaler.unscale_(sgd);
    scaler.step(sgd);
    scaler.update();
    sgd.zero_grad();
  }
  counts = false;
  EXPECT_EQ(allocations, 0);
}

std::int64_t reads = 0;
std::int64_t depth = 0;

at::RecordFunctionCallback count_reads() {
  return at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        if (depth++ == 0 && std::string_view(function.name()) == "aten::item") ++reads;
        return nullptr;
      },
      [](const at::RecordFunction&, at::ObserverContext*) { --depth; });
}

/// How often 20 steps read a number of a tensor, which waits for a GPU. Kernels of the CPU read
/// numbers themselves, such as step counts: what an operator calls does not count.
std::int64_t reads_of(PrecisionType precision) {
  Loop<AdamW> loop(AdamWOptions{.lr = 1e-3}, precision);
  at::CallbackHandle handle = 0;
  loop.run([&] {
    reads = depth = 0;
    handle = at::addThreadLocalCallback(count_reads());
  });
  at::removeCallback(handle);
  return reads;
}

TEST_F(StepCost, ReadsNoNumberOfATensor) {
  EXPECT_EQ(reads_of(PrecisionType::kNo), 0);
  EXPECT_EQ(reads_of(PrecisionType::kBf16), 0);
}

TEST_F(StepCost, CountsReads) {
  reads = depth = 0;
  const auto handle = at::addThreadLocalCallback(count_reads());
  (void)torch::ones({1}).item<float>();
  at::removeCallback(handle);
  EXPECT_EQ(reads, 1);
}

}  // namespace
}  // namespace accelerate
