// Collectives of processes on one host, next to Gloo as it comes with LibTorch; collectives.py does
// the same work with Python Accelerate.
//
//     bench/run.sh starts both under the same launcher and prints the ratios
#include <cstring>
#include <fstream>
#include <map>

#include "comm/peers.h"
#include "core/copy_past_cache.h"
#include "support.h"

namespace {

using accelerate::PartialState;

struct Record {
  std::int64_t id = 0;
  std::string name;
  std::vector<double> score;
};

accelerate::Value to_value(const Record& record) {
  return accelerate::Value::Dict{
      {"id", record.id}, {"name", record.name}, {"score", accelerate::to_value(record.score)}};
}

Record from_value(std::type_identity<Record>, const accelerate::Value& value) {
  const auto& fields = value.as_dict();
  return {fields.at("id").as_int(), fields.at("name").as_string(),
          accelerate::from_value<std::vector<double>>(fields.at("score"))};
}

double resident_megabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

/// One of the library's functions.
void measure(const std::string& name, const std::function<void()>& ours) {
  bench::report(name, bench::median(bench::in_turns({ours})[0]), "us");
}

/// A collective of c10d, on our backend and on Gloo.
void measure(const std::string& name, const std::function<void(const bench::Group&)>& call,
             const bench::Group& ours, const bench::Group& gloo) {
  const auto times = bench::in_turns({[&] { call(ours); }, [&] { call(gloo); }});
  bench::report(name, bench::median(times[0]), "us");
  bench::report(name + ", raw Gloo", bench::median(times[1]), "us");
}

/// What ranks that share memory cannot do without in an all-gather: each puts its part there and
/// takes those of all. Nobody waits for anybody. This is what the memory of the machine gives.
class Copies {
 public:
  Copies(int ranks, std::int64_t bytes)
      : own_(torch::zeros({bytes}, torch::kByte)),
        piece_(torch::zeros({kPiece}, torch::kByte)),
        all_(torch::zeros({ranks, bytes}, torch::kByte)) {}

  void operator()() const {
    auto* const piece = bytes_of(piece_);
    const bool large = accelerate::detail::exceeds_cache(all_.nbytes() * all_.size(0));
    for (std::int64_t at = 0; at < own_.numel(); at += kPiece) {
      std::memcpy(piece, bytes_of(own_) + at, kPiece);
      for (std::int64_t rank = 0; rank < all_.size(0); ++rank) {
        auto* const to = bytes_of(all_[rank]) + at;
        if (large) {
          accelerate::detail::copy_past_cache(to, piece, kPiece);
        } else {
          std::memcpy(to, piece, kPiece);
        }
      }
    }
  }

 private:
  static constexpr std::int64_t kPiece = 1 << 20;
  static std::byte* bytes_of(const torch::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.mutable_data_ptr());
  }

  torch::Tensor own_, piece_, all_;
};

// As torch.distributed calls them when nobody asks for asynchronous ones.

void all_reduce(const bench::Group& group, const torch::Tensor& tensor) {
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  std::vector<torch::Tensor> tensors{tensor};
  group->allreduce(tensors, options)->wait();
}

void all_gather(const bench::Group& group, torch::Tensor& all, torch::Tensor& own) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  accelerate::detail::comm::all_gather_into(*group, all, own, options)->wait();
}

void barrier(const bench::Group& group) {
  c10d::BarrierOptions options;
  options.asyncOp = false;
  options.device = c10::Device(c10::kCPU);
  group->barrier(options)->wait();
}

}  // namespace

int main() {
  const PartialState state({.cpu = true});
  bench::report("resident memory, state up", resident_megabytes(), "MB");
  at::set_num_threads(1);
  const auto ours = state.process_group();
  const auto gloo = bench::raw_gloo();
  bench::settle();

  const std::vector<std::pair<std::string, std::int64_t>> sizes = {
      {"8 B", 8}, {"1 KB", 1 << 10}, {"64 KB", 1 << 16}, {"4 MB", 1 << 22}, {"64 MB", 1 << 26}};
  for (const auto& [label, bytes] : sizes) {
    auto own = torch::zeros({bytes / 4});
    auto all = torch::zeros({state.num_processes() * bytes / 4});
    measure("reduce " + label, [&] { (void)accelerate::reduce(own); });
    measure("gather " + label, [&] { (void)accelerate::gather(own); });
    measure("all-reduce " + label, [&](const auto& group) { all_reduce(group, own); }, ours, gloo);
    measure(
        "all-gather " + label, [&](const auto& group) { all_gather(group, all, own); }, ours, gloo);
  }
  measure("barrier", barrier, ours, gloo);
  measure("copies of an all-gather of 4 MB, alone", Copies(state.num_processes(), 4 << 20));

  measure("gather tree of 8 tensors", [&] {
    std::map<int, torch::Tensor> tree;
    for (int i = 0; i < 8; ++i) tree[i] = torch::ones({16});
    (void)accelerate::gather(tree);
  });
  const std::vector<Record> records(8, Record{3, "sample", {0.5, 0.25}});
  measure("gather_object of 8 records", [&] { (void)accelerate::gather_object(records); });
  measure("wait_for_everyone", [&] { state.wait_for_everyone(); });
}
