// Our side of traces.sh.
//
//     interop_trace data CASES FILE   writes data and first weights, for Python
//     interop_trace run CASES FILE    trains the cases for as many processes as it was started with
#include <accelerate/accelerate.h>

#include <fstream>
#include <stdexcept>
#include <string>

#include "accelerator/trace_runs.h"

namespace {

namespace test = accelerate::test;

void run(const std::string& what, const std::string& cases, const std::string& path) {
  const auto grid = test::read_json(cases);
  const test::TraceData data(grid);
  if (what == "data") {
    data.save(path);
    return;
  }
  accelerate::PartialState state({.cpu = true});
  test::Json traces = test::Json::array();
  for (const auto& one : test::cases_for(grid, state.num_processes())) {
    traces.push_back(test::run_trace(grid, one, data));
  }
  if (!state.is_main_process()) return;
  std::ofstream file(path);
  if (!(file << traces.dump() << "\n")) throw std::runtime_error("cannot write " + path);
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    if (argc != 4) throw std::runtime_error("usage: interop_trace data|run CASES FILE");
    run(argv[1], argv[2], argv[3]);
  });
}
