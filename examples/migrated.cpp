// The programs of docs/migrating.md in one: a training script of Python Accelerate line by line,
// then what other scripts do that this one does not.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/migrated
//
// Last line: "result: 99 % of 500 test points right"
// One process: "result: 99.4 % of 500 test points right"
#include <accelerate/accelerate.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <utility>

namespace F = torch::nn::functional;

// --- the script ----------------------------------------------------------------------------------

struct Clusters {
  Clusters(std::int64_t count, std::uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    labels = torch::randint(4, {count}, generator);
    points = 4 * F::one_hot(labels, 16) + torch::randn({count, 16}, generator);
  }
  std::size_t size() const { return labels.size(0); }
  std::pair<torch::Tensor, torch::Tensor> get(std::size_t i) { return {points[i], labels[i]}; }

  torch::Tensor labels, points;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(16, 64));
    out = register_module("out", torch::nn::Linear(64, 4));
  }
  torch::Tensor features(const torch::Tensor& x) { return torch::relu(hidden(x)); }
  torch::Tensor forward(const torch::Tensor& x) { return out(features(x)); }

  torch::nn::Linear hidden = nullptr, out = nullptr;
};
TORCH_MODULE(Net);

constexpr int kEpochs = 3;

double train(accelerate::Accelerator& accelerator) {
  accelerate::set_seed(42);

  auto data = accelerate::make_data_loader(Clusters(2000, 1), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(Clusters(500, 2), {.batch_size = 64});

  Net net;
  auto adamw = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(3e-3));

  const auto steps = kEpochs * data.size() / accelerator.gradient_accumulation_steps();
  auto schedule = accelerate::get_cosine_schedule_with_warmup(adamw, steps / 10, steps);

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(schedule));

  double percent = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    model.train();
    for (auto& [x, y] : loader) {
      const auto accumulating = accelerator.accumulate(model);
      const auto loss = F::cross_entropy(model(x), y);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) {
        accelerator.clip_grad_norm_(model.parameters(), 1.0);
      }
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }

    model.eval();
    std::int64_t right = 0, seen = 0;
    const torch::NoGradGuard no_grad;
    for (auto& [x, y] : test_loader) {
      const auto [predictions, labels] =
          accelerator.gather_for_metrics(std::pair{model(x).argmax(-1), y});
      right += (predictions == labels).sum().item<std::int64_t>();
      seen += labels.size(0);
    }
    percent = 100.0 * right / seen;
    accelerator.print("epoch", epoch, percent, "% of", seen, "right");
  }
  return percent;
}

// --- notes ---------------------------------------------------------------------------------------

/// A loader, a model and an optimizer for the pieces below.
auto make_parts(std::int64_t count = 1000) {
  Net net;
  auto sgd = torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1));
  auto data = accelerate::make_data_loader(Clusters(count, 3), {.batch_size = 16});
  return std::tuple{net, std::move(sgd), std::move(data)};
}

void lvalues(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();

  torch::optim::StepLR halving(sgd, /*step_size=*/30, /*gamma=*/0.5);
  auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, halving);

  const auto x = torch::rand({1, 16}, accelerator.device());
  const auto scores = model(x);            // forward: bf16 inside, float32 comes out
  const auto hidden = model->features(x);  // any other member: bf16 comes out
  accelerator.print("scores are", scores.scalar_type(), "and features", hidden.scalar_type());

  auto plain = accelerator.unwrap_model(model);  // the Net that was prepared

  accelerator.free_memory(model, optimizer, scheduler);
}

void scopes(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();
  auto model = accelerator.prepare(net);
  const auto x = torch::rand({2, 16}, accelerator.device());

  const auto first = model(x).sum();
  {
    const auto alone = accelerator.no_sync(model);
    accelerator.backward(first);  // gradients stay with this process
  }
  accelerator.backward(model(x).sum());  // the sum of both is averaged

  accelerator.main_process_first([&] {
    // Downloads on process 0; the others come when it is through, and find the files.
  });

  const auto labels = torch::zeros(2, torch::TensorOptions(torch::kLong).device(x.device()));
  {
    const auto casting = accelerator.autocast();
    accelerator.backward(F::cross_entropy(model->forward(x), labels));
  }
  accelerator.free_memory(model);
}

void handlers() {
  accelerate::Accelerator accelerator(
      {.kwargs_handlers = {accelerate::DistributedDataParallelKwargs{.bucket_cap_mb = 50},
                           accelerate::GradScalerKwargs{.init_scale = 1024}}});
  accelerator.print("handlers were taken");
}

void adversaries(accelerate::Accelerator& accelerator) {
  torch::nn::Linear painter(4, 16), judge(16, 1);
  accelerate::Adam adam_of_painter(painter->parameters(), {.lr = 1e-3});
  accelerate::Adam adam_of_judge(judge->parameters(), {.lr = 1e-3});
  auto data = accelerate::make_data_loader(Clusters(200, 4), {.batch_size = 16});

  auto [paint, score, paint_optimizer, score_optimizer, loader] = accelerator.prepare(
      painter, judge, std::move(adam_of_painter), std::move(adam_of_judge), std::move(data));
  for (auto& [real, label] : loader) {
    const auto fake = paint(torch::randn({real.size(0), 4}, real.options()));

    // Reaches the judge alone: only its gradients are averaged.
    const auto judged = F::softplus(-score(real)) + F::softplus(score(fake.detach()));
    accelerator.backward(judged.mean());
    score_optimizer.step();
    score_optimizer.zero_grad();

    // Reaches both. The judge makes no step with it, so its gradients need not travel.
    const auto alone = accelerator.no_sync(score);
    accelerator.backward(F::softplus(-score(fake)).mean());
    paint_optimizer.step();
    paint_optimizer.zero_grad();
    score_optimizer.zero_grad();
  }
  accelerator.free_memory(paint, score, paint_optimizer, score_optimizer, loader);
}

void several_losses(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();
  auto [model, optimizer] = accelerator.prepare(net, std::move(sgd));
  const auto x = torch::rand({8, 16}, accelerator.device());

  const auto output = model(x);
  {
    const auto alone = accelerator.no_sync(model);
    accelerator.backward(output.pow(2).mean(), {.retain_graph = true});
  }
  accelerator.backward(output.abs().mean());  // one message for both losses
  optimizer.step();
  optimizer.zero_grad();

  accelerator.free_memory(model, optimizer);
}

void until_good(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();
  auto [model, optimizer] = accelerator.prepare(net, std::move(sgd));
  accelerate::set_seed(7, {.device_specific = true});  // other samples on each process

  for (int step = 0; step < 1000; ++step) {
    const auto x = torch::randn({8, 16}, accelerator.device());
    const auto loss = model(x).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    if (accelerator.agree_to_stop(loss.item<double>() < 0.01)) break;
  }
  accelerator.free_memory(model, optimizer);
}

void uneven(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();
  auto [model, optimizer, loader] = accelerator.prepare(net, std::move(sgd), std::move(data));

  std::int64_t batches = 0;
  accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false}, [&] {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
      ++batches;
    }
  });
  accelerator.print("process 0 had", batches, "batches");
  accelerator.free_memory(model, optimizer, loader);
}

void local_sgd(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();
  auto [model, optimizer, loader] = accelerator.prepare(net, std::move(sgd), std::move(data));

  accelerate::run_local_sgd(accelerator, model, {.local_sgd_steps = 8}, [&](auto& local) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
      local.step();
    }
  });
  accelerator.free_memory(model, optimizer, loader);
}

struct SplatsImpl : torch::nn::Module {
  SplatsImpl() { means = register_parameter("means", torch::rand({100, 2})); }
  torch::Tensor forward(const torch::Tensor& points) {
    return torch::cdist(points, means).amin(1).mean();
  }
  torch::Tensor means;
};
TORCH_MODULE(Splats);

void splatting(accelerate::Accelerator& accelerator) {
  Splats splats;
  auto [model, optimizer] =
      accelerator.prepare(splats, accelerate::Adam(splats->parameters(), {.lr = 1e-2}));
  const auto points = torch::rand({64, 2}, accelerator.device());

  for (int step = 1; step <= 30; ++step) {
    accelerator.backward(model(points));
    optimizer.step();
    optimizer.zero_grad();
    if (step % 10 == 0) {
      const auto all = torch::arange(splats->means.size(0), splats->means.device());
      const auto twice = (splats->means.select(1, 0) > 0.5).nonzero().squeeze(1);
      const auto kept = torch::cat({all, twice});
      const auto carry = [&](auto&, auto& old) { return old.index({kept}); };
      model.replace_parameter("means", splats->means.index({kept}), {.state = carry});
    }
  }
  accelerator.free_memory(model, optimizer);
}

void metrics(accelerate::Accelerator& accelerator) {
  auto [net, sgd, data] = make_parts();
  auto [model, optimizer, loader] = accelerator.prepare(net, std::move(sgd), std::move(data));

  accelerate::DeferredMetrics metrics;
  for (auto& [x, y] : loader) {
    const auto loss = F::cross_entropy(model(x), y);
    accelerator.backward(loss);
    metrics.add("loss", loss);  // no waiting
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.print("loss", metrics.reduce().at("loss").as_double());  // of all processes

  accelerator.free_memory(model, optimizer, loader);
}

int main() {
  return accelerate::record([] {
    accelerate::Accelerator accelerator(
        {.mixed_precision = accelerate::PrecisionType::kBf16, .gradient_accumulation_steps = 2});
    const double percent = train(accelerator);

    accelerator.free_memory();
    accelerator.set_gradient_accumulation_steps(1);
    lvalues(accelerator);
    scopes(accelerator);
    handlers();
    adversaries(accelerator);
    several_losses(accelerator);
    until_good(accelerator);
    uneven(accelerator);
    local_sgd(accelerator);
    splatting(accelerator);
    metrics(accelerator);
    accelerator.print("result:", std::round(10 * percent) / 10, "% of 500 test points right");
  });
}
