#include "accelerate/local_sgd.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate {

using detail::str;

namespace {

/// The dimension of a mesh whose processes hold the same model and see different data.
constexpr const char* kReplicas = "dp_replicate";

}  // namespace

LocalSGD::LocalSGD(const Accelerator& accelerator, std::shared_ptr<torch::nn::Module> module,
                   const LocalSGDOptions& options)
    : module_(std::move(module)),
      mesh_(accelerator.torch_device_mesh()),
      local_sgd_steps_(options.local_sgd_steps),
      enabled_(options.enabled && accelerator.use_distributed()) {
  if (local_sgd_steps_ < 1) {
    throw ArgumentError(str("local_sgd_steps is ", local_sgd_steps_,
                            ", but parameters are averaged after some "
                            "steps: give 1 or more."));
  }
  const auto type = accelerator.distributed_type();
  if (type == DistributedType::kFsdp || type == DistributedType::kDeepspeed ||
      type == DistributedType::kMegatronLm) {
    throw UnsupportedError(str("LocalSGD is for processes that hold whole models, not for ", type,
                               ". Use plain data parallelism (MULTI_CPU, MULTI_GPU)."));
  }
  if (mesh_ && !mesh_->has(kReplicas)) {
    throw UnsupportedError(
        str("LocalSGD averages over ", kReplicas, ", but the mesh of parallelism_config has only ",
            detail::join(mesh_->mesh_dim_names()), ". Set ", kReplicas, "_size."));
  }
}

void LocalSGD::step(std::source_location where) {
  ++num_steps_;
  if (enabled_ && num_steps_ % local_sgd_steps_ == 0) average(where);
}

void LocalSGD::average(std::source_location where) {
  if (!enabled_) return;
  const at::NoGradGuard no_grad;
  auto parameters = module_->parameters();
  // One message for all of them.
  const auto means = mesh_
                         ? reduce(parameters, mesh_->get_group(kReplicas), Reduction::kMean, where)
                         : reduce(parameters, Reduction::kMean, 1.0, where);
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(means[i]);
}

}  // namespace accelerate
