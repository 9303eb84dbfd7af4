// What the guard adds to a collective, and what its side thread takes when the process is idle and
// when it is busy. ACCELERATE_HOST_BACKEND says on which backend.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "comm/shm_backend.h"
#include "support.h"

namespace {

using accelerate::PartialState;
using Backend = c10::intrusive_ptr<c10d::Backend>;

class NoGuard final : public accelerate::detail::comm::CallGuard {
 public:
  [[nodiscard]] accelerate::detail::comm::Ticket enter(
      const accelerate::detail::comm::CallFacts&) override {
    return {.sequence = 1, .signature = 1};
  }
  void leave(const accelerate::detail::comm::Ticket&) noexcept override {}
  [[noreturn]] void fail(const accelerate::detail::comm::Ticket&, const std::string& what,
                         int) override {
    throw std::runtime_error(what);
  }
  [[nodiscard]] bool failed() const noexcept override { return false; }
};

Backend shared_memory_without_guard(const PartialState& state) {
  std::string why_not;
  Backend made = accelerate::detail::comm::ShmBackend::try_make(
      c10::make_intrusive<c10d::PrefixStore>("unguarded", state.store()), state.process_index(),
      state.num_processes(), {}, std::make_shared<NoGuard>(), why_not);
  if (!made) throw std::runtime_error("no shared memory: " + why_not);
  return made;
}

void all_reduce(const Backend& backend, std::vector<torch::Tensor>& tensors) {
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  backend->allreduce(tensors, options)->wait();
}

void barrier(const Backend& backend) {
  c10d::BarrierOptions options;
  options.asyncOp = false;
  backend->barrier(options)->wait();
}

void measure(const std::string& name, const std::function<void(const Backend&)>& call,
             const Backend& guarded, const Backend& unguarded) {
  const auto times = bench::in_turns({[&] { call(guarded); }, [&] { call(unguarded); }},
                                     /*rounds=*/51, /*round=*/5'000);
  std::vector<double> differences;
  for (std::size_t i = 0; i < times[0].size(); ++i) {
    differences.push_back(times[0][i] - times[1][i]);
  }
  bench::report(name + ", guarded", bench::median(times[0]), "us");
  bench::report(name + ", not guarded", bench::median(times[1]), "us");
  bench::report(name + ", the guard's part", bench::median(differences), "us");
}

/// Nanoseconds that the guard's threads of this process have had a core.
double side_thread_nanoseconds() {
  double sum = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    double nanoseconds = 0;
    if (name == "side channel") {
      std::ifstream(task.path() / "schedstat") >> nanoseconds;
    }
    sum += nanoseconds;
  }
  return sum;
}

void measure_side_thread(const std::string& name, const std::function<void()>& meanwhile) {
  const auto seconds = std::chrono::seconds(5);
  const auto before = side_thread_nanoseconds();
  const auto start = bench::Clock::now();
  const int repeats = bench::repeats_of(meanwhile, 100'000);
  bool enough = false;
  while (!enough) {
    for (int i = 0; i < repeats; ++i) meanwhile();
    const std::vector<bool> over{bench::Clock::now() - start > seconds};
    enough = accelerate::gather_object(over).front();
  }
  const double nanoseconds =
      std::chrono::duration<double, std::nano>(bench::Clock::now() - start).count();
  bench::report(name, (side_thread_nanoseconds() - before) / nanoseconds * 100, "%");
}

}  // namespace

int main() {
  const PartialState state({.cpu = true});
  at::set_num_threads(1);
  const auto guarded = state.process_group()->getBackend(c10::kCPU);
  const bool shared = guarded->getBackendName() == "shm";
  const auto unguarded =
      shared ? shared_memory_without_guard(state) : bench::raw_gloo()->getBackend(c10::kCPU);
  const std::string on = shared ? " on shared memory" : " on Gloo";
  std::vector<torch::Tensor> tensors{torch::zeros({256})};
  measure(
      "all-reduce 1 KB" + on, [&](const auto& backend) { all_reduce(backend, tensors); }, guarded,
      unguarded);
  measure("barrier" + on, barrier, guarded, unguarded);
  measure_side_thread("side thread while idle" + on,
                      [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
  measure_side_thread("side thread while busy" + on, [&] { all_reduce(guarded, tensors); });
}
