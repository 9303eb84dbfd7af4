#include "core/backend_choice.h"

#include <algorithm>
#include <array>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

struct AcceleratorRow {
  std::string_view device;
  DistributedType type;
  std::string_view backend;
  /// Whether a caller may put another backend in place.
  bool replaceable;
};

constexpr std::array<AcceleratorRow, 8> kAccelerators{{
    {"mlu", DistributedType::kMultiMlu, "cncl", false},
    {"sdaa", DistributedType::kMultiSdaa, "tccl", false},
    {"musa", DistributedType::kMultiMusa, "mccl", false},
    {"npu", DistributedType::kMultiNpu, "hccl", false},
    {"hpu", DistributedType::kMultiHpu, "hccl", true},
    {"cuda", DistributedType::kMultiGpu, "nccl", true},
    {"xpu", DistributedType::kMultiXpu, "xccl", true},
    {"neuron", DistributedType::kMultiNeuron, "neuron", false},
}};

const AcceleratorRow& row_of(const std::string& device) {
  const auto* found = std::ranges::find(kAccelerators, device, &AcceleratorRow::device);
  if (found != kAccelerators.end()) return *found;
  throw UnsupportedError(str("several processes on device '", device,
                             "' are not supported. Run one process, or set cpu."));
}

[[noreturn]] void does_not_fit(const std::string& asked, std::string_view chosen,
                               std::string_view where) {
  throw ConfigError(str("backend is '", asked, "', which cannot be used on ", where, " here. Use '",
                        chosen, "', or leave it out."));
}

// Known for sure, or seen from an index beyond the devices.
int processes_here(const BackendFacts& facts) {
  return facts.local_size.value_or(facts.local_rank + 1);
}

BackendChoice on_accelerator(const BackendFacts& facts) {
  const AcceleratorRow& row = row_of(facts.accelerator);
  if (facts.backend && !row.replaceable && *facts.backend != row.backend) {
    does_not_fit(*facts.backend, row.backend, facts.accelerator);
  }
  BackendChoice choice{.type = row.type,
                       .backend = facts.backend.value_or(std::string(row.backend)),
                       .device_index = facts.local_rank % std::max(1, facts.device_count)};
  const int here = processes_here(facts);
  if (here > facts.device_count && uses_nccl(*choice.backend)) {
    const std::string counts = str(here, " processes on this host share ", facts.device_count,
                                   facts.device_count == 1 ? " GPU" : " GPUs");
    if (facts.backend) {
      throw CommError(
          str(counts, ", but nccl needs a GPU of its own for each process. Start at most ",
              facts.device_count, " here, or leave the backend out: then gloo is used."));
    }
    choice.backend = "gloo";
    choice.warning =
        str(counts,
            ": they communicate by gloo, through the host's memory, which is slow. Start at most ",
            facts.device_count, " here to use nccl.");
  }
  if (facts.collectives_on_cpu_too && (choice.backend == "nccl" || choice.backend == "xccl")) {
    choice.backend = str(facts.accelerator, ":", *choice.backend, ",cpu:gloo");
  }
  return choice;
}

BackendChoice on_cpu(const BackendFacts& facts) {
  if (facts.backend && *facts.backend != "gloo") does_not_fit(*facts.backend, "gloo", "the CPU");
  return {.type = DistributedType::kMultiCpu, .backend = "gloo", .cpu = true};
}

}  // namespace

bool uses_nccl(const std::string& backend) { return backend.find("nccl") != std::string::npos; }

BackendChoice choose_backend(const BackendFacts& facts) {
  if (!facts.launched) return {.cpu = facts.cpu || facts.accelerator.empty()};
  if (facts.cpu) return on_cpu(facts);
  if (!facts.accelerator.empty()) return on_accelerator(facts);
  if (facts.num_processes == 1) return {.cpu = true};
  BackendChoice choice = on_cpu(facts);
  choice.warning =
      str(facts.num_processes,
          " processes were started on a machine without accelerator: they work together "
          "on the CPU. Set cpu (or ACCELERATE_USE_CPU=1) to say that this is meant.");
  return choice;
}

}  // namespace accelerate::detail::inline core
