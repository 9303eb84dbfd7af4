// Inference on several processes: nothing is trained. First requests of different lengths, which
// are shared out as a list; then a dataset that is read in batches. Each process has the whole
// model; the answers come back in the order of the questions.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/inference
//
// Last line: "result: 7 requests answered, the longest with 41 bytes; 1000 points, 501 above 0"
#include <accelerate/accelerate.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

const std::vector<std::string> kRequests = {
    "short", "a longer one", "What is the answer to the last question?!", "x", "to be",
    "or",    "not"};

/// Stands for a model that reads a text of any length.
struct ScorerImpl : torch::nn::Module {
  torch::nn::Embedding bytes = register_module("bytes", torch::nn::Embedding(256, 16));
  torch::nn::Linear score = register_module("score", torch::nn::Linear(16, 1));

  torch::Tensor forward(const torch::Tensor& text) { return score(bytes(text).mean(0)); }
};
TORCH_MODULE(Scorer);

torch::Tensor bytes_of(const std::string& text) {
  return torch::tensor(std::vector<std::int64_t>(text.begin(), text.end()));
}

/// A request and its score.
using Answer = std::pair<std::string, double>;

std::vector<Answer> answer_requests(accelerate::Accelerator& accelerator) {
  // Weights come from a file in a real program: read it on all processes.
  Scorer net;
  net->eval();
  auto model = accelerator.prepare_model(net, {.evaluation_mode = true});

  const auto mine = accelerator.split_between_processes(kRequests);
  std::vector<Answer> answers;
  for (const auto& request : mine) {
    const auto text = bytes_of(request).to(accelerator.device());
    answers.emplace_back(request, model(text).item<double>());
  }
  auto all = accelerate::gather_object(answers);  // of all processes, in the order of the requests
  all.resize(kRequests.size());  // with fewer requests than processes the last one comes again
  return all;
}

torch::Tensor predict(accelerate::Accelerator& accelerator, const torch::Tensor& points) {
  torch::nn::Linear net(8, 1);
  net->eval();
  auto model = accelerator.prepare_model(net, {.evaluation_mode = true});
  auto loader = accelerator.prepare(accelerate::make_data_loader(points, {.batch_size = 64}));

  std::vector<torch::Tensor> predictions;
  for (auto& x : loader) {
    predictions.push_back(accelerator.gather_for_metrics(model(x)).cpu());
  }
  return torch::cat(predictions);  // [points, 1], in their order
}

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);  // the same weights everywhere
  const torch::NoGradGuard no_grad;

  const auto answers = answer_requests(accelerator);
  std::size_t longest = 0;
  for (const auto& [request, score] : answers) {
    accelerator.print("'" + request + "' scores", score);
    longest = std::max(longest, request.size());
  }

  const auto points = torch::randn({1000, 8});
  const auto above = (predict(accelerator, points) > 0).sum().item<std::int64_t>();
  accelerator.print("result:", answers.size(), "requests answered, the longest with", longest,
                    "bytes;", points.size(0), "points,", above, "above 0");
}

int main() { return accelerate::record(run); }
