// accelerate tpu-config: refused by name.
#include "accelerate/errors.h"
#include "cli/commands.h"

namespace accelerate::cli {

int tpu_config(const detail::launch::Arguments& /*arguments*/) {
  throw UnsupportedError(
      "`accelerate tpu-config` sets up TPU pods for XLA, which exists for Python only, so it "
      "cannot run here. Use Python's accelerate for TPUs, or `gcloud compute tpus tpu-vm ssh` to "
      "run commands on the machines of a pod.");
}

}  // namespace accelerate::cli
