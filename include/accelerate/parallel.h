// accelerate/parallel.h - models that are cut over processes, each of which computes a part.
//
//     apply_tp_plan(*net, plan, accelerator.torch_device_mesh());  // layers of torch::nn, in place
//     accelerate::nn::ColumnParallelLinear up(768, 3072, group);   // or layers that are cut
//     Pipeline pipeline(net, loss, options);                       // or stages
//
// docs/parallelism.md says which way of cutting suits which model.
#pragma once

#include "accelerate/parallel/context_parallel.h"
#include "accelerate/parallel/layers.h"
#include "accelerate/parallel/megatron.h"
#include "accelerate/parallel/pipeline.h"
#include "accelerate/parallel/pipeline_layers.h"
#include "accelerate/parallel/pipeline_schedule.h"
#include "accelerate/parallel/pippy.h"
#include "accelerate/parallel/regions.h"
#include "accelerate/parallel/sequence_parallel.h"
#include "accelerate/parallel/tp_plan.h"
