// accelerate/mpi.h - for programs that own MPI: meet through their communicator.
//
// Header-only, so that the library itself needs no MPI:
//
//     MPI_Init(&argc, &argv);
//     accelerate::PartialState state(accelerate::from_mpi(MPI_COMM_WORLD));
//
// A program that only happens to be started by mpirun needs none of this: `PartialState` reads the
// variables that mpirun sets.
#pragma once

#include <mpi.h>

#include <array>
#include <string>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/state/partial_state_options.h"

namespace accelerate {
namespace detail::state {

inline void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw CommError(std::string(call) + " failed: " + text.data());
}

inline std::string mpi_broadcast(MPI_Comm communicator, std::string text) {
  int length = static_cast<int>(text.size());
  check_mpi(MPI_Bcast(&length, 1, MPI_INT, 0, communicator), "MPI_Bcast");
  text.resize(static_cast<std::size_t>(length));
  check_mpi(MPI_Bcast(text.data(), length, MPI_CHAR, 0, communicator), "MPI_Bcast");
  return text;
}

}  // namespace detail::state

/// Collective over `communicator`. Options for a `PartialState` whose processes are those of the
/// communicator, in its order; whatever else `options` says is kept. MPI is used only inside this
/// call: it carries the address of rank 0, and nothing has to be set.
///
/// Throws `StateError` before `MPI_Init` and after `MPI_Finalize`, `CommError` when a call of MPI
/// or the connection to rank 0 fails.
[[nodiscard]] inline PartialStateOptions from_mpi(MPI_Comm communicator,
                                                  PartialStateOptions options = {}) {
  int started = 0;
  int ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  if (started == 0 || ended != 0) {
    throw StateError("from_mpi: MPI is not running. Call it between MPI_Init and MPI_Finalize.");
  }
  detail::state::ProcessPlace place;
  detail::state::check_mpi(MPI_Comm_rank(communicator, &place.rank), "MPI_Comm_rank");
  detail::state::check_mpi(MPI_Comm_size(communicator, &place.size), "MPI_Comm_size");
  MPI_Comm host = MPI_COMM_NULL;
  detail::state::check_mpi(
      MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, place.rank, MPI_INFO_NULL, &host),
      "MPI_Comm_split_type");
  MPI_Comm_rank(host, &place.local_rank);
  MPI_Comm_size(host, &place.local_size);
  MPI_Comm_free(&host);
  return detail::state::meet_by_broadcast(
      std::move(options), place, [communicator](std::string text) {
        return detail::state::mpi_broadcast(communicator, std::move(text));
      });
}

}  // namespace accelerate
