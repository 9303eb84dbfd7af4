// A program that owns MPI and lets the library meet through its communicator. Run under mpirun by
// ctest; ends with 0 when every rank found its place.
#include "accelerate/mpi.h"

#include <torch/torch.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdlib>
#include <iostream>
#include <string>

#include "accelerate/environment.h"
#include "accelerate/state.h"

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::cerr << "mpi_program: " << what << "\n";
  ++failures;
}

void meet_and_add(MPI_Comm communicator) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  accelerate::PartialState state(accelerate::from_mpi(communicator, {.cpu = true}));
  expect(state.process_index() == rank, "the rank is not that of the communicator");
  expect(state.num_processes() == size, "the size is not that of the communicator");
  expect(state.local_num_processes() == size, "all processes are on this host");
  auto sum = torch::full({1}, rank + 1);
  std::vector<torch::Tensor> tensors{sum};
  state.process_group()->allreduce(tensors)->wait();
  expect(sum.item<int>() == size * (size + 1) / 2, "the sum over all ranks is wrong");
  state.wait_for_everyone();
  state.destroy_process_group();
  accelerate::PartialState::_reset_state();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    (void)accelerate::from_mpi(MPI_COMM_WORLD);
    expect(false, "from_mpi went on before MPI_Init");
  } catch (const accelerate::StateError&) {
  }
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  ::setenv("OMP_NUM_THREADS", "1", 1);
  // No address is set, and none is needed.
  meet_and_add(MPI_COMM_WORLD);
  // The same processes counted from the other end.
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
  meet_and_add(reversed);
  MPI_Comm_free(&reversed);
  // And without MPI's help: by the variables of mpirun, at a port that no other test has.
  int port = 12000 + ::getpid() % 16000;
  while (accelerate::is_port_in_use(port)) ++port;
  MPI_Bcast(&port, 1, MPI_INT, 0, MPI_COMM_WORLD);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  {
    accelerate::PartialState state({.cpu = true});
    expect(state.process_index() == rank, "the variables of mpirun were not understood");
    state.wait_for_everyone();
    state.destroy_process_group();
  }
  int all_failures = 0;
  MPI_Allreduce(&failures, &all_failures, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0 && all_failures == 0) std::cout << "mpi_program: all ranks agree\n";
  MPI_Finalize();
  return all_failures == 0 ? 0 : 1;
}
