// Two processes that find each other, share work and agree.
//
//     build/dev/examples/agree                                  starts two processes by itself
//     torchrun --nproc_per_node 4 --no-python build/dev/examples/agree    joins those it is told of
//
// Last line: "result: 2 processes agree on fa728f27 after N s" (N is below 1)
#include <accelerate/accelerate.h>

#include <chrono>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace {

using Clock = std::chrono::steady_clock;

/// A number that differs if any bit of the tensor does.
std::string checksum(const torch::Tensor& tensor) {
  const auto bytes = tensor.cpu().contiguous().flatten().view(torch::kUInt8);
  std::uint32_t sum = 2166136261U;
  for (std::int64_t i = 0; i < bytes.numel(); ++i) {
    sum = (sum ^ bytes.data_ptr<std::uint8_t>()[i]) * 16777619U;
  }
  std::ostringstream text;
  text << std::hex << std::setw(8) << std::setfill('0') << sum;
  return std::move(text).str();
}

std::string describe(const accelerate::PartialState& state) {
  std::ostringstream text;
  text << "rank " << state.process_index() << ": device " << state.device() << ", backend "
       << state.backend().value_or("none") << ", host " << state.host_name();
  return std::move(text).str();
}

void work(Clock::time_point start) {
  accelerate::PartialState state;
  accelerate::set_seed(42, {.device_specific = true});
  state.print(state.num_processes(), state.num_processes() == 1 ? "process" : "processes");

  // Every process describes itself; everybody hears it, in the order of the ranks.
  for (const auto& line : accelerate::gather_object(std::vector{describe(state)}))
    state.print(line);

  // Ten items are dealt out, worked on, and collected: one collective for the whole map.
  const auto mine =
      state.split_between_processes(torch::arange(10), {.apply_padding = true}).to(state.device());
  const std::map<std::string, torch::Tensor> results = {{"input", mine}, {"square", mine * mine}};
  const auto all = accelerate::gather(results);
  state.print("gathered:", accelerate::listify(all.at("square")).repr());

  // Each rank draws other numbers; after the mean over ranks all hold the same ones.
  const auto mean = accelerate::reduce(torch::rand({1000}, state.device()));
  const auto sums = accelerate::gather_object(std::vector{checksum(mean)});
  for (std::size_t rank = 0; rank < sums.size(); ++rank) {
    state.print("checksum on rank", rank, sums[rank]);
  }
  const bool agree = std::ranges::all_of(sums, [&](const auto& sum) { return sum == sums[0]; });
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  state.print(
      "result:", state.num_processes(), state.num_processes() == 1 ? "process" : "processes",
      agree ? "agree on" : "DISAGREE on", sums[0], "after", std::round(seconds * 100) / 100, "s");
  if (!agree) throw accelerate::CommError("the processes hold different numbers");
}

}  // namespace

int main() {
  return accelerate::record([] {
    const auto start = Clock::now();
    const bool launched = accelerate::Environment::process().contains("RANK");
    if (launched) {
      work(start);
    } else {
      accelerate::debug_launcher([start] { work(start); }, {.num_processes = 2});
    }
  });
}
