// The programs of docs/data.md in one: every kind of data, samplers, workers, several processes.
//
//     build/dev/examples/data_loading
//     accelerate launch --cpu --num_processes 2 build/dev/examples/data_loading
//
// Last line: "result: 10 of 10 samples in 2 batches per process, then 2 after resuming"
// One process: "result: 10 of 10 samples in 3 batches per process, then 6 after resuming"
#include <accelerate/accelerate.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace accelerate;

// --- datasets -----------------------------------------------------------------------------------

struct Columns {
  at::Tensor ids, mask;
};
constexpr auto tensor_tree_fields(std::type_identity<Columns>) {
  return std::tuple{field("ids", &Columns::ids), field("mask", &Columns::mask)};
}

struct Sample {
  at::Tensor pixels;
  int label;
};
struct Batch {
  at::Tensor pixels, label;
};
constexpr auto tensor_tree_fields(std::type_identity<Sample>) {
  return std::tuple{field("pixels", &Sample::pixels), field("label", &Sample::label)};
}
constexpr auto tensor_tree_fields(std::type_identity<Batch>) {
  return std::tuple{field("pixels", &Batch::pixels), field("label", &Batch::label)};
}
constexpr std::type_identity<Batch> collated_as(std::type_identity<Sample>) { return {}; }

struct Folder {
  std::vector<std::string> files;
  std::size_t size() const { return files.size(); }
  Sample get(std::size_t i) { return {torch::zeros({3, 32, 32}), static_cast<int>(i)}; }
};

struct Examples : torch::data::datasets::Dataset<Examples> {
  torch::data::Example<> get(std::size_t i) override {
    return {torch::full({2}, static_cast<float>(i)), torch::tensor(static_cast<float>(i))};
  }
  std::optional<std::size_t> size() const override { return 10; }
};

struct Lines {
  std::string path;
  std::ifstream file = {};
  void reset() { file = std::ifstream(path); }  // a pass begins
  std::optional<std::string> next() {
    std::string line;
    if (!std::getline(file, line)) return std::nullopt;
    return line;
  }
};

// --- samplers -----------------------------------------------------------------------------------

struct EveryOther {
  std::int64_t at = 0;
  void begin(std::int64_t epoch) { at = epoch % 2; }
  std::optional<std::int64_t> next() {
    if (at >= 10) return std::nullopt;
    return std::exchange(at, at + 2);
  }
};

// --- collate ------------------------------------------------------------------------------------

at::Tensor pad(const std::vector<std::vector<std::int64_t>>& sequences) {
  std::vector<at::Tensor> rows;
  for (const auto& sequence : sequences) rows.push_back(torch::tensor(sequence));
  return torch::nn::utils::rnn::pad_sequence(rows, /*batch_first=*/true);  // [batch, longest]
}

namespace {

/// What a program does with its batches.
template <class... T>
void train(const T&... /*batch*/) {}

void datasets(const std::string& path) {
  auto inputs = torch::rand({1000, 8});
  auto labels = torch::randint(10, {1000});
  auto loader = make_data_loader(std::pair{inputs, labels}, {.batch_size = 16, .shuffle = true});
  for (auto& [x, y] : loader) {
    train(x, y);  // [16, 8] and [16]
  }

  Columns data{torch::arange(100), torch::ones(100)};
  for (auto& batch : make_data_loader(data, {.batch_size = 4})) {
    train(batch.ids, batch.mask);
  }

  std::vector<int> numbers = {5, 6, 7};
  auto of_a_vector = make_data_loader(numbers, {.batch_size = 2});  // tensors of int64

  auto squares = FunctionDataset{100, [](std::int64_t i) { return i * i; }};
  auto of_a_function = make_data_loader(squares, {.batch_size = 10});

  auto folder = std::make_shared<Folder>(Folder{{"a.png", "b.png"}});
  for (Batch& batch : make_data_loader(folder, {.batch_size = 2, .num_workers = 4})) {
    train(batch.pixels, batch.label);  // [2, 3, 32, 32] and [2]
  }

  for (auto& batch : make_data_loader(Examples(), {.batch_size = 5})) {
    train(batch.data, batch.target);
  }

  auto lines = make_data_loader(Lines{path}, {.batch_size = 32});
  for (std::vector<std::string>& batch : lines) {
    train(batch);  // up to 32 lines
  }

  auto dice = [engine = std::mt19937(1)]() mutable -> std::optional<int> {
    const auto roll = static_cast<int>(engine() % 6);
    return roll == 5 ? std::nullopt : std::optional(roll);
  };
  auto rolls = make_data_loader(dice, {.batch_size = 8});
}

void samplers() {
  auto data = torch::arange(10);
  auto weights = torch::rand({10});
  auto weighted = make_data_loader(data, WeightedRandomSampler(weights, 100), {.batch_size = 4});
  auto subset = make_data_loader(data, SubsetRandomSampler({0, 2, 4}), {.batch_size = 2});
  auto listed = make_data_loader(data, std::vector{3, 1, 2}, {.batch_size = 2});
  auto torchs = make_data_loader(data, torch::data::samplers::RandomSampler(10));
  auto own = make_data_loader(data, EveryOther{}, {.batch_size = 2});

  auto batches = BatchSampler(std::make_shared<SequentialSampler>(10), 4, /*drop_last=*/true);
  auto in_batches = make_data_loader(data, batches);
}

void collating() {
  std::vector<std::vector<std::int64_t>> sequences = {{1, 2, 3}, {4}, {5, 6}};
  for (at::Tensor& batch : make_data_loader(sequences, {.batch_size = 3}, pad)) {
    train(batch);  // [3, 3], zeros behind the shorter ones
  }
}

void workers() {
  auto noisy = FunctionDataset{1000, [](std::int64_t i, at::Generator& generator) {
                                 return torch::full({8}, static_cast<float>(i)) +
                                        torch::randn({8}, generator);
                               }};
  auto loader = make_data_loader(noisy, {.batch_size = 16,
                                         .shuffle = true,
                                         .num_workers = 4,
                                         .generator = at::make_generator<at::CPUGeneratorImpl>(7),
                                         .prefetch_factor = 2});
  for (auto& batch : loader) {
    train(batch);
    break;  // the workers stop behind the samples that they are at
  }
}

void errors() {
  auto broken = FunctionDataset{10, [](std::int64_t i) {
                                  if (i == 7) throw std::runtime_error("image 7 is torn");
                                  return i;
                                }};
  try {
    for (auto& batch : make_data_loader(broken, {.batch_size = 4, .num_workers = 2})) {
      train(batch);
    }
  } catch (const DataLoaderError& error) {
    std::cerr << error.what() << '\n';  // batch 1, error.indices() are 4, 5, 6, 7
    try {
      std::rethrow_if_nested(error);
    } catch (const std::runtime_error& cause) {
      std::cerr << cause.what() << '\n';  // image 7 is torn
    }
  }
}

void several_processes(PartialState& state) {
  auto plain = make_data_loader(torch::arange(10), {.batch_size = 4, .shuffle = true});
  auto loader = prepare_data_loader(plain, {.put_on_device = true,
                                            .rng_types = {RNGType::kGenerator},
                                            .use_seedable_sampler = true,
                                            .data_seed = 42});
  std::int64_t seen = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    loader.set_epoch(epoch);
    for (auto& batch : loader) {
      seen += gather_for_metrics(batch).numel();  // 10 in a pass, on any number of processes
    }
  }

  for (auto& batch : skip_first_batches(loader, 1)) {
    train(batch);  // without the first batch; the next pass over `loader` is whole
  }

  DataLoaderState saved;
  for (auto& batch : loader) {
    train(batch);
    saved = loader.state_dict();  // while the batch is held: the next one follows
    break;
  }
  loader.load_state_dict(saved);
  std::int64_t rest = 0;
  for (auto& batch : loader) rest += gather_for_metrics(batch).numel();

  Value dictionary = to_value(saved);
  loader.load_state_dict(from_value<DataLoaderState>(dictionary));

  state.print("result:", seen / 2, "of 10 samples in", loader.size(), "batches per process, then",
              rest, "after resuming");
}

void dispatching() {
  auto read = [i = 0]() mutable { return i < 10 ? std::optional(i++) : std::nullopt; };
  auto stream = make_data_loader(read, {.batch_size = 4});
  auto dispatched = prepare_data_loader(stream, {.put_on_device = true, .dispatch_batches = true});
  for (auto& batch : dispatched) {
    train(batch);  // read on process 0 alone; each process has its part
  }
}

void run() {
  PartialState state({.cpu = true});
  const auto name = "data_loading_" + std::to_string(getpid()) + ".txt";
  const auto path = (std::filesystem::temp_directory_path() / name).string();
  std::ofstream(path) << "one\ntwo\nthree\nfour\nfive\n";
  datasets(path);
  samplers();
  collating();
  workers();
  errors();
  dispatching();
  several_processes(state);
  std::filesystem::remove(path);
}

}  // namespace

int main() { return record(run); }
