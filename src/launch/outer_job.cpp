#include <string>
#include <utility>

#include "core/world.h"
#include "launch/resolve.h"

namespace accelerate::detail::launch {
namespace {

bool several(const Environment& environment, const char* variable) {
  return environment.integer({std::string(variable)}, -1) > 1;
}

bool in_mpi(const Environment& environment) {
  return several(environment, "PMI_SIZE") || several(environment, "OMPI_COMM_WORLD_SIZE") ||
         several(environment, "MV2_COMM_WORLD_SIZE");
}

// The place in a Slurm step, without the address, whose lookup is slow.
World slurm_world(const Environment& environment) {
  if (!environment.contains("SLURM_STEP_ID")) return {};
  auto variables = environment.variables();
  // Some clusters export torchrun's variables with other meanings.
  for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
                           "GROUP_WORLD_SIZE", "MASTER_PORT"}) {
    variables.erase(name);
  }
  variables["MASTER_ADDR"] = "unknown";
  return detect_world(Environment(std::move(variables)), {});
}

}  // namespace

std::int64_t mpi_size(const Environment& environment, std::int64_t fallback) {
  return environment.integer({"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}, fallback);
}

std::int64_t mpi_local_size(const Environment& environment, std::int64_t fallback) {
  return environment.integer(
      {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"}, fallback);
}

OuterJob outer_job(const Environment& environment, World& world) {
  // WORLD_SIZE alone is not a job: some containers set it.
  if (several(environment, "WORLD_SIZE") && environment.contains("RANK")) {
    return OuterJob::kTorchrun;
  }
  world = slurm_world(environment);
  // srun with PMI sets MPI's variables as well, but only Slurm's name the node.
  const bool slurm = world.source != WorldSource::kAlone && world.node_rank && world.num_nodes;
  if (slurm && *world.num_nodes > 1 && world.size == *world.num_nodes) {
    return OuterJob::kSlurmNodes;
  }
  if (slurm) return OuterJob::kSlurmTasks;
  return in_mpi(environment) ? OuterJob::kMpi : OuterJob::kNone;
}

}  // namespace accelerate::detail::launch
