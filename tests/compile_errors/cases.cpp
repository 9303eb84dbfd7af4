// tests/compile_errors/cases.cpp - mistakes that the compiler must explain in our words.
//
// This file does not compile. check.sh compares the first error of each function with the comment
// in front of it.
#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

using accelerate::Accelerator;
using accelerate::make_data_loader;

/// A struct that nothing here takes. Each case has one of its own, as the compiler explains a
/// template only once.
template <int>
struct Odd {
  int number = 0;
};
template <int>
struct NoGet {
  std::size_t size() const { return 3; }
};
struct NoSize {
  at::Tensor get(std::size_t) { return {}; }
};
struct OddSamples {
  Odd<0> get(std::size_t) { return {}; }
  std::size_t size() const { return 3; }
};
struct Samples {
  at::Tensor get(std::size_t) { return {}; }
  std::size_t size() const { return 3; }
};

// ---- data ---------------------------------------------------------------------------------------

// expect: this dataset has size(), but no get(index)
void dataset_without_get() { std::ignore = make_data_loader(NoGet<1>(), {.batch_size = 2}); }

// expect: this dataset has size(), but no get(index)
void shared_dataset_without_get(std::shared_ptr<NoGet<2>> dataset) {
  std::ignore = make_data_loader(dataset);
}

// expect: this dataset has get(index), but no size()
void dataset_without_size() { std::ignore = make_data_loader(NoSize(), {.batch_size = 2}); }

// expect: this is no dataset
void dataset_that_is_none() { std::ignore = make_data_loader(Odd<1>()); }

// expect: there is no rule how samples of this type become a batch
void sample_that_no_rule_joins() {
  std::ignore = make_data_loader(OddSamples(), {.batch_size = 2});
}

// expect: the collate function cannot be called with a std::vector of the samples
void collate_of_other_samples() {
  std::ignore = make_data_loader(Samples(), {}, [](std::vector<int> numbers) { return numbers; });
}

// expect: the second argument of make_data_loader is neither options nor a sampler
void sampler_that_is_none() { std::ignore = make_data_loader(Samples(), Odd<2>(), {}); }

// expect: a sampler needs a dataset with samples by index
void sampler_for_iterable_data() {
  std::ignore = make_data_loader([] { return std::optional(at::Tensor()); }, std::vector{1});
}

// expect: the function of a FunctionDataset takes the index of a sample
void function_dataset_of_a_text() {
  std::ignore = accelerate::FunctionDataset(3, [](std::string) { return at::Tensor(); });
}

// ---- prepare ------------------------------------------------------------------------------------

// expect: prepare takes a model as a module holder (TORCH_MODULE) or as a std::shared_ptr
void model_by_value(Accelerator& accelerator, torch::nn::LinearImpl& net) {
  std::ignore = accelerator.prepare(net);
}

// expect: prepare needs something to prepare
void nothing_to_prepare(Accelerator& accelerator) { std::ignore = accelerator.prepare(); }

// expect: this is no model: give a prepared model, a module holder
void model_that_is_none(Accelerator& accelerator) {
  std::ignore = accelerator.prepare_model(Odd<3>());
}

// expect: this is no torch::optim::Optimizer
void optimizer_that_is_none(Accelerator& accelerator) {
  std::ignore = accelerator.prepare_optimizer(3);
}

// expect: this is no scheduler of accelerate/scheduler.h or torch::optim
void scheduler_that_is_none(Accelerator& accelerator) {
  std::ignore = accelerator.prepare_scheduler(3);
}

// expect: register_for_checkpointing takes objects with state_dict() and load_state_dict
void register_without_a_state(Accelerator& accelerator, Odd<4>& object) {
  accelerator.register_for_checkpointing(object);
}

// expect: register_for_checkpointing takes objects with state_dict() and load_state_dict
void register_shared_without_a_state(Accelerator& accelerator, std::shared_ptr<Odd<5>>& object) {
  accelerator.register_for_checkpointing(object);
}

// ---- a step -------------------------------------------------------------------------------------

// expect: accumulate takes prepared models, or a function without arguments
void accumulate_of_no_model(Accelerator& accelerator) {
  std::ignore = accelerator.accumulate(Odd<6>());
}

// expect: this is no model: give a prepared model, a module holder
void no_sync_of_no_model(Accelerator& accelerator) { std::ignore = accelerator.no_sync(Odd<7>()); }

// expect: this is no model: give a prepared model, a module holder
void unwrap_of_no_model(Accelerator& accelerator) {
  std::ignore = accelerator.unwrap_model(Odd<8>());
}

// expect: this is no model: give a prepared model, a module holder
void state_dict_of_no_model(Accelerator& accelerator) {
  std::ignore = accelerator.get_state_dict(Odd<9>());
}

// expect: this is no model: give a prepared model, a module holder
void join_of_no_model(Accelerator& accelerator, Odd<10>& object) {
  accelerator.join_uneven_inputs(std::tie(object), {.even_batches = false}, [] {});
}

// expect: this is no model: give a prepared model, a module holder
void local_sgd_of_no_model(Accelerator& accelerator) {
  accelerate::run_local_sgd(accelerator, Odd<11>(), {}, [](accelerate::LocalSGD&) {});
}

// expect: the function of run_local_sgd takes a LocalSGD&
void local_sgd_without_its_argument(Accelerator& accelerator, torch::nn::Linear& net) {
  accelerate::run_local_sgd(accelerator, net, {}, [] {});
}

// ---- between processes --------------------------------------------------------------------------

// expect: this type cannot be sent to other processes as tensors
void gather_of_numbers(Accelerator& accelerator) {
  std::ignore = accelerator.gather(std::vector<int>{1});
}

// expect: this type cannot be sent to other processes as tensors
void reduce_of_a_struct(Accelerator& accelerator) { std::ignore = accelerator.reduce(Odd<12>()); }

// expect: this type cannot be sent to other processes as tensors
void pad_of_a_struct(Accelerator& accelerator) {
  std::ignore = accelerator.pad_across_processes(Odd<13>());
}

// expect: objects of this type, or something in it, cannot be sent to other processes
void object_without_a_form(Odd<14>* object) {
  std::ignore = accelerate::gather_object(std::vector{object});
}

// expect: split_between_processes takes a sequence, a tuple, a map, a tensor
void split_of_a_number(Accelerator& accelerator) {
  std::ignore = accelerator.split_between_processes(3);
}

// ---- functions ----------------------------------------------------------------------------------

// expect: the function must take the batch size first
void batch_size_that_is_not_taken() {
  accelerate::find_executable_batch_size([](std::string) {}, {.starting_batch_size = 8})();
}

// expect: a raw pointer owns nothing
void release_of_a_raw_pointer(Odd<15>* object) { accelerate::release_memory(object); }

// expect: debug_launcher cannot call the function with these arguments
void debug_launch_with_a_text() {
  accelerate::debug_launcher([](int) {}, {}, std::string());
}

// expect: notebook_launcher cannot call the function with these arguments
void notebook_launch_without_arguments() {
  accelerate::notebook_launcher([](int) {}, {});
}

// expect: record takes a function without arguments that returns an int or nothing
void record_of_arguments() {
  std::ignore = accelerate::record([](int) { return 0; });
}

// expect: record takes a function without arguments that returns an int or nothing
void record_of_a_text() {
  std::ignore = accelerate::record([] { return std::string(); });
}

// expect: no way to turn this type into a Value
void value_of_a_struct(const Odd<16>& object) { std::ignore = accelerate::to_value(object); }
