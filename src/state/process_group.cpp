#include "state/process_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <csignal>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "accelerate/errors.h"
#include "core/call_site.h"
#include "core/exception_text.h"
#include "core/processes.h"
#include "core/text.h"
#include "state/accelerator_backend.h"
#include "state/pending_messages.h"
#include "state/roster.h"

namespace accelerate::detail::state {
namespace {

using BackendType = c10d::ProcessGroup::BackendType;

struct DeviceBackend {
  c10::DeviceType device;
  std::string name;  // "gloo" or "nccl"
};

std::string checked_name(const std::string& name, const std::string& whole) {
  if (name == "gloo" || name == "nccl") return name;
  static const std::set<std::string> elsewhere{"mpi",  "ucc",  "xccl", "hccl",
                                               "cncl", "tccl", "mccl", "neuron"};
  if (elsewhere.contains(name)) {
    throw UnsupportedError(
        str("backend '", whole, "' asks for ", name,
            ", which this LibTorch does not contain. Use gloo (CPU) or nccl (NVIDIA GPUs)."));
  }
  throw ConfigError(str("backend is '", whole, "', which is not a backend. ",
                        "Choose gloo, nccl, or a pair such as cuda:nccl,cpu:gloo."));
}

/// "cuda:nccl,cpu:gloo" names a backend per device; a bare name serves what it can.
std::vector<DeviceBackend> parse_backend(const std::string& text) {
  std::vector<DeviceBackend> result;
  for (const auto& part : detail::split(to_lower(text), ',')) {
    const auto colon = part.find(':');
    if (colon == std::string::npos) {
      const auto name = checked_name(part, text);
      // Gloo moves CUDA tensors too (through the host); NCCL never CPU tensors.
      if (name == "gloo") result.push_back({c10::kCPU, name});
      result.push_back({c10::kCUDA, name});
      continue;
    }
    const auto device = part.substr(0, colon);
    const auto name = checked_name(part.substr(colon + 1), text);
    if (device == "cpu" && name == "nccl") {
      throw ConfigError(
          str("backend is '", text, "', but nccl has no CPU side. ", "Use cuda:nccl,cpu:gloo."));
    }
    if (device != "cpu" && device != "cuda") {
      throw UnsupportedError(str("backend is '", text, "', but this LibTorch has no device '",
                                 device, "'. Use cpu or cuda."));
    }
    result.push_back({device == "cpu" ? c10::kCPU : c10::kCUDA, name});
  }
  return result;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                            const ProcessGroupOptions& options,
                                            const Roster& roster) {
  AcceleratorBackend* accelerator = accelerator_backend();
  if (accelerator == nullptr) {
    throw UnsupportedError(str("backend nccl needs a GPU, and none can be used here: ",
                               why_no_accelerator(), ". Use gloo, or run where a GPU is."));
  }
  return accelerator->make_nccl(c10::make_intrusive<c10d::PrefixStore>("nccl", store), options,
                                make_device_guard(options, roster.under("nccl")));
}

// On the host a collective ends by itself at its timeout, with the name of the missing rank. The
// wait for a collective on a device needs a timeout of its own.
std::chrono::milliseconds limit_of_wait(c10::Device device, std::chrono::milliseconds timeout) {
  return device.is_cpu() ? kNoTimeout : timeout;
}

// Runs a collective of c10d; what goes wrong in it becomes a `CommError` with the caller's place.
template <class F>
void or_comm_error(std::source_location where, F&& f) {
  try {
    f();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw CommError(str("waiting for the other processes failed at ", where.file_name(), ":",
                        where.line(), ": ", current_exception_text().message));
  }
}

/// Takes the arguments that all versions of LibTorch give `splitGroup`; newer ones have more.
template <class Function>
class SplittingGroup;
template <class R, class... Args>
class SplittingGroup<R (c10d::ProcessGroup::*)(Args...)> : public c10d::ProcessGroup {
 public:
  using c10d::ProcessGroup::ProcessGroup;

  R splitGroup(Args... args) final {
    const auto all = std::tie(args...);
    return split(std::get<0>(all), std::get<1>(all), std::get<3>(all), std::get<4>(all));
  }

 protected:
  virtual R split(const std::vector<int>& ranks,
                  const std::optional<std::chrono::milliseconds>& timeout,
                  const std::optional<std::string>& name,
                  const std::optional<std::string>& description) = 0;
};

// c10d splits a group backend by backend, all under one name in the store: with Gloo for two
// devices the second one would wait for addresses that the first has used up. A split of ours is a
// new group of the same kind.
class Group : public SplittingGroup<decltype(&c10d::ProcessGroup::splitGroup)> {
 public:
  Group(const c10::intrusive_ptr<c10d::Store>& store, const ProcessGroupOptions& options)
      : SplittingGroup(store, options.rank, options.world_size), store_(store), options_(options) {}

  /// In a forked process the backends stay: the ends of their threads and connections belong to the
  /// process that made them.
  ~Group() override { keep_backends_of_owner(); }
  void release_resources() override {
    keep_backends_of_owner();
    c10d::ProcessGroup::release_resources();
  }

  /// Ends the groups that were split off, too.
  void shutdown() override {
    for (const auto& part : parts_) {
      if (const auto group = part.lock()) group->shutdown();
    }
    c10d::ProcessGroup::shutdown();
  }

 protected:
  c10::intrusive_ptr<c10d::ProcessGroup> split(
      const std::vector<int>& ranks, const std::optional<std::chrono::milliseconds>& timeout,
      const std::optional<std::string>& name,
      const std::optional<std::string>& description) override {
    const auto own = std::ranges::find(ranks, options_.rank);
    if (own == ranks.end()) {
      throw ArgumentError(str("splitGroup: rank ", options_.rank,
                              " is not among the ranks of the new group, ", join(ranks), "."));
    }
    auto options = options_;
    options.rank = static_cast<int>(own - ranks.begin());
    options.world_size = static_cast<int>(ranks.size());
    options.timeout = timeout.value_or(options.timeout);
    options.global_ranks = ranks;
    if (!options_.global_ranks.empty()) {
      for (auto& rank : options.global_ranks) rank = options_.global_ranks.at(rank);
    }
    // The same ranks may be split off again, each time as a new group.
    const auto place = str("split/", join(ranks), "/", splits_[ranks]++);
    auto group = make_process_group(c10::make_intrusive<c10d::PrefixStore>(place, store_), options);
    group->setGroupName(name.value_or(str(getGroupName(), "/", place)));
    if (description) group->setGroupDesc(*description);
    std::erase_if(parts_, [](const auto& part) { return part.expired(); });
    parts_.emplace_back(group);
    return group;
  }

 private:
  void keep_backends_of_owner() {
    if (!owner_.is_forked_copy() || std::exchange(kept_, true)) return;
    for (const auto& device : getDeviceTypes()) (void)getBackend(device.type()).release();
  }

  c10::intrusive_ptr<c10d::Store> store_;
  ProcessGroupOptions options_;
  std::map<std::vector<int>, int> splits_;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> parts_;
  OwnerProcess owner_;
  bool kept_ = false;
};

/// Runs the part of the start in Gloo, whose error texts name no rank.
template <class F>
auto connected(const Roster& roster, const ProcessGroupOptions& options, F&& connect) {
  std::string why;
  try {
    return connect();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    why = current_exception_text().message;
  }
  roster.fail(str("rank ", options.rank, " could not connect to the other ranks within ",
                  in_words(options.timeout), ": ", why));
}

/// Gloo writes to connections whose other side may be gone, which must be an error and not the
/// silent end of this process by SIGPIPE. A program that handles the signal keeps its handler.
void survive_broken_pipes() {
  struct sigaction action{};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  ::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, const ProcessGroupOptions& options) {
  survive_broken_pipes();
  // Later waits at the store, such as for NCCL's ids, use the same timeout.
  store->setTimeout(options.timeout);
  const Roster roster(store, options.rank, options.world_size, options.timeout);
  c10::intrusive_ptr<c10d::ProcessGroup> group = c10::make_intrusive<Group>(store, options);
  std::optional<HostBackends> host;
  std::optional<BackendType> first;
  for (const auto& [device, name] : parse_backend(options.backend)) {
    auto type = BackendType::NCCL;
    if (name == "nccl") {
      group->setBackend(device, type, make_nccl(store, options, roster));
    } else {
      if (!host) {
        host = connected(roster, options, [&] {
          return make_host_backends(c10::make_intrusive<c10d::PrefixStore>("gloo", store), options,
                                    roster.under("gloo"));
        });
      }
      // c10d has one backend per type: the backend for the CPU is registered as Gloo.
      const bool shared = host->cpu != nullptr;
      type = shared && device != c10::kCPU ? BackendType::CUSTOM : BackendType::GLOO;
      group->setBackend(device, type, shared && device == c10::kCPU ? host->cpu : host->gloo);
    }
    if (!first) first = type;
  }
  group->setDefaultBackend(*first);
  group->setGroupName("accelerate_world");
  return group;
}

void barrier(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
             std::chrono::milliseconds timeout, std::source_location where) {
  send_pending();
  c10d::BarrierOptions options;
  options.timeout = timeout;
  options.device = device;
  const AtCallSite site(where);
  if (device.is_cuda()) options.device_ids = {device.index()};
  or_comm_error(where, [&] { group->barrier(options)->wait(limit_of_wait(device, timeout)); });
}

std::int64_t all_reduce_max(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::int64_t own,
                            c10::Device device, std::chrono::milliseconds timeout,
                            std::source_location where) {
  send_pending();
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.timeout = timeout;
  const AtCallSite site(where);
  std::int64_t largest = 0;
  or_comm_error(where, [&] {
    std::vector<at::Tensor> numbers{at::full({1}, own, at::device(device).dtype(at::kLong))};
    group->allreduce(numbers, options)->wait(limit_of_wait(device, timeout));
    largest = numbers.front().item<std::int64_t>();
  });
  return largest;
}

}  // namespace accelerate::detail::state
