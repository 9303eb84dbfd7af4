// accelerate/operations.h - what can be done with nested tensors, here and across processes.
//
//     auto batch = send_to_device(std::move(raw), accelerator.device());
//     auto predictions = gather(pad_across_processes(logits));
//     auto loss = reduce(batch_loss, Reduction::kMean);
//     auto names = gather_object(std::vector<std::string>{name});
//
// tensor_operations.h holds what stays in this process, collectives.h what moves tensors and
// object_operations.h what moves other data between processes.
#pragma once

#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/collectives.h"
#include "accelerate/operations/objects.h"
#include "accelerate/operations/tensors.h"
#include "accelerate/value/from_value.h"
